"""The fast encoding of a stream's chunks is, byte for byte, the plain one."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.gateway.openai.chunks import StreamChunks
from sluice.gateway.openai.encoded import EncodedChunks
from sluice.producer.operations.follow import Cursor, StreamEvent
from sluice.protocol.openai_format.requests import ENDPOINTS, Endpoint
from sluice.protocol.outputs.parser import OutputParser
from sluice.protocol.states import JobState
from sluice.protocol.wire import End, JobId, TokenLogprobs, Usage

ENDS = st.none() | st.sampled_from(
    [
        End(state=JobState.DONE, finish_reason="stop", usage=Usage(prompt_tokens=1, output_tokens=2)),
        End(state=JobState.FAILED, error="it broke"),
    ]
)
MARKS = ["<think>", '<tool_call>{"name": "f", "arguments": {', "}}"]
TEXTS = st.text(max_size=4) | st.sampled_from([*MARKS, "\0", "\u2028", '"\\u0000"', "\ud83d\ude00", ""])
EVENTS = st.builds(
    StreamEvent,
    job_id=st.just(JobId("0.t.a")),
    choice=st.integers(0, 2),
    start=st.just(0),
    token_ids=st.just((7,)),
    text=TEXTS,
    time_ms=st.just(0),
    logprobs=st.none() | st.just((TokenLogprobs(chosen=-0.5, top=((7, -0.5),)),)),
    end=ENDS,
    format=st.sampled_from(["", "think+hermes"]),
    position=st.just(Cursor(1, 1)),
)


def as_begun(events: list[StreamEvent]) -> list[StreamEvent]:
    """Events of which only the first of each choice states the format."""
    firsts = {event.choice: number for number, event in reversed(list(enumerate(events)))}
    return [
        event if firsts[event.choice] == number else event._replace(format="") for number, event in enumerate(events)
    ]


def plain(chunks: StreamChunks, events: list[StreamEvent]) -> bytes:
    """The chunks, each encoded for itself."""
    found = [chunk for event in events for chunk in chunks.of(event)] + chunks.usage()
    return b"".join(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" for chunk in found)


class TestGivenChoicesWhoseEndsAreReadInAnyOrder:
    """Each end counts the tokens of all choices up to it."""

    @pytest.mark.parametrize("counts", [(2, 7), (7, 2)])
    def test_when_usage_is_asked_for_then_all_tokens_are_counted(self, counts: tuple[int, int]) -> None:
        chunks = StreamChunks(ENDPOINTS[0], JobId("0.t.a"), "m", has_usage=True)

        for choice, count in enumerate(counts):
            usage = Usage(prompt_tokens=1, output_tokens=count)
            end = End(state=JobState.DONE, finish_reason="stop", usage=usage)
            chunks.of(
                StreamEvent(
                    job_id=JobId("0.t.a"),
                    choice=choice,
                    start=0,
                    token_ids=(),
                    text="",
                    time_ms=0,
                    logprobs=None,
                    end=end,
                    format="",
                    position=Cursor(1),
                )
            )

        assert chunks.usage()[0]["usage"]["completion_tokens"] == 7


class TestGivenTheEventsOfAStream:
    @pytest.mark.parametrize("endpoint", ENDPOINTS)
    @given(events=st.lists(EVENTS, max_size=12).map(as_begun), model=TEXTS, has_usage=st.booleans())
    def test_when_they_are_encoded_then_the_bytes_are_those_of_the_plain_form(
        self, endpoint: Endpoint, events: list[StreamEvent], model: str, has_usage: bool
    ) -> None:
        chunks = StreamChunks(endpoint, JobId("0.t.a"), model, has_usage)
        encoded = EncodedChunks(
            replace(chunks, _begun=set[int](), _parsers=dict[int, OutputParser](), _callers=set[int]())
        )

        found = b"".join(map(encoded.of, events)) + encoded.usage()

        assert found == plain(chunks, events)
        assert found.isascii()
        assert b"\r" not in found
