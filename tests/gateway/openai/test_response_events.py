"""The fold of raw output into events: the same numbers and characters, however the output was cut."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.gateway.openai.response_events import ENDED, FIRST_DELTA, STRIDE, OutputChanged, ResponseEvents
from sluice.gateway.openai.responses import ResponseEnd, ResponseInfo, response_end
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, Usage, decode_entry, encode_entry
from tests.examples import examples

INFO = ResponseInfo(job_id=JobId("0.acme.a1"), created_ms=1_000, model="null", options={})
USAGE = Usage(prompt_tokens=3, output_tokens=5)
Event = dict[str, Any]  # Any: JSON

pieces = st.lists(st.text(max_size=5), max_size=8)
outcomes = st.sampled_from(
    [
        (JobState.DONE, "stop"),
        (JobState.DONE, "length"),
        (JobState.FAILED, None),
        (JobState.EXPIRED, None),
        (JobState.CANCELLED, None),
    ]
)


def events_of(texts: list[str], end: ResponseEnd, after: int = -1) -> list[Event]:
    """All events that a reader gets who has those up to a number."""
    fold = ResponseEvents(INFO, after)
    return [*fold.begin(), *(event for text in texts for event in fold.add(text, end.format)), *fold.finish(end)]


def ended(
    text: str, outcome: tuple[JobState, str | None] = (JobState.DONE, "stop"), output_format: str = ""
) -> ResponseEnd:
    """The end of a job with this output."""
    return response_end(*outcome, (text, output_format), USAGE, (None, "it broke"))


def recut(text: str, cuts: list[int]) -> list[str]:
    """The same text in other pieces."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


def characters(events: list[Event]) -> dict[int, str]:
    """Each character that deltas carry, by the number that an event has which ends with it."""
    found: dict[int, str] = {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            begin = event["sequence_number"] // STRIDE - len(event["delta"])
            for place, character in enumerate(event["delta"], begin + 1):
                assert place not in found
                found[place] = character
    return found


def others(events: list[Event]) -> list[Event]:
    """All events but deltas."""
    return [event for event in events if event["type"] != "response.output_text.delta"]


class TestGivenAnyOutput:
    @given(texts=pieces, outcome=outcomes)
    def test_when_it_is_folded_then_numbers_rise_and_deltas_are_the_output(
        self, texts: list[str], outcome: tuple[JobState, str | None]
    ) -> None:
        text = "".join(texts)

        events = events_of(texts, ended(text, outcome))

        numbers = [event["sequence_number"] for event in events]
        assert all(before < after for before, after in pairwise(numbers))
        assert characters(events) == dict(enumerate(text, 1))
        assert events[-1]["response"]["status"] == ended(text, outcome).status

    @given(texts=pieces, cuts=st.lists(st.integers(min_value=0), max_size=8), outcome=outcomes)
    def test_when_it_is_cut_otherwise_then_numbers_and_contents_are_the_same(
        self, texts: list[str], cuts: list[int], outcome: tuple[JobState, str | None]
    ) -> None:
        text = "".join(texts)
        end = ended(text, outcome)

        first, second, whole = events_of(texts, end), events_of(recut(text, cuts), end), events_of([], end)

        assert others(first) == others(second) == others(whole)
        assert characters(first) == characters(second) == characters(whole)

    @given(texts=pieces, cuts=st.lists(st.integers(min_value=0), max_size=8), place=st.integers(0), outcome=outcomes)
    def test_when_a_reader_comes_back_after_any_event_then_it_gets_exactly_the_rest(
        self, texts: list[str], cuts: list[int], place: int, outcome: tuple[JobState, str | None]
    ) -> None:
        text = "".join(texts)
        end = ended(text, outcome)
        before = events_of(texts, end)
        before = before[: place % len(before) + 1]

        after = events_of(recut(text, cuts), end, before[-1]["sequence_number"])

        assert characters(before + after) == dict(enumerate(text, 1))
        assert others(before + after) == others(events_of(texts, end))
        assert all(event["sequence_number"] > before[-1]["sequence_number"] for event in after)

    @given(texts=pieces, number=st.integers(-1, 1600))
    def test_when_a_reader_names_any_number_then_it_gets_what_comes_after_it(
        self, texts: list[str], number: int
    ) -> None:
        text = "".join(texts)

        events = events_of(texts, ended(text), number)

        # The first character follows the events of the beginning of its item.
        num_sent = max(0, number) // STRIDE if number >= STRIDE + FIRST_DELTA else 0
        assert "".join(characters(events).values()) == text[num_sent:]
        assert all(event["sequence_number"] > number for event in events)


MARKED = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", "Hm.", "Yes. ", "<tool_call>", '{"name": "f", "arguments": {"a": 1', "}}", "}"),
            *("</tool_call>", "\n", '{"arguments": {"b": 2}, "name": "g"}', '{"name": 3}', "<", "é"),
        ]
    ),
    max_size=10,
)
FORMATS = st.sampled_from(["hermes", "think+hermes", "open_think+hermes", "open_think"])


def state_of(events: list[Event]) -> dict[int, tuple[str, str]]:
    """What a client makes of events: type and text of each item, by its place."""
    items: dict[int, tuple[str, str]] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] not in items
            items[event["output_index"]] = event["item"]["type"], ""
        if event["type"].endswith(".delta"):
            kind, text = items[event["output_index"]]
            items[event["output_index"]] = kind, text + event["delta"]
    return items


def described(item: Event) -> tuple[str, str]:
    """Type and text of an item of the output."""
    return item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


class TestGivenOutputWithMarks:
    @given(texts=MARKED, output_format=FORMATS, outcome=outcomes)
    @settings(max_examples=examples(600), deadline=None)
    def test_when_it_is_folded_then_numbers_rise_and_items_are_those_of_the_end(
        self, texts: list[str], output_format: str, outcome: tuple[JobState, str | None]
    ) -> None:
        events = events_of(texts, ended("".join(texts), outcome, output_format))

        numbers = [event["sequence_number"] for event in events]
        assert all(before < after for before, after in pairwise(numbers))
        items = [described(item) for item in events[-1]["response"]["output"]]
        assert list(state_of(events).values()) == items
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        is_whole = outcome[0] is JobState.DONE
        assert [described(item) for item in done] == (items if is_whole else items[:-1])

    @given(
        texts=MARKED,
        cuts=st.lists(st.integers(min_value=0), max_size=8),
        place=st.integers(0),
        output_format=FORMATS,
        outcome=outcomes,
    )
    @settings(max_examples=examples(600), deadline=None)
    def test_when_a_reader_comes_back_after_any_event_then_it_gets_exactly_the_rest(
        self,
        texts: list[str],
        cuts: list[int],
        place: int,
        output_format: str,
        outcome: tuple[JobState, str | None],
    ) -> None:
        text = "".join(texts)
        end = ended(text, outcome, output_format)
        whole = events_of(texts, end)
        before = whole[: place % len(whole) + 1]

        after = events_of(recut(text, cuts), end, before[-1]["sequence_number"])

        def without_deltas(events: list[Event]) -> list[Event]:
            return [event for event in events if not event["type"].endswith(".delta")]

        assert without_deltas(before + after) == without_deltas(whole)
        assert state_of(before + after) == state_of(whole)

    def test_when_it_has_thoughts_text_and_a_call_then_each_is_an_item(self) -> None:
        texts = ["<think>Hm.</think>", "Yes.", '<tool_call>{"name": "f", "argum', 'ents": {"a"', ": 1}}</tool_call>"]

        events = events_of(texts, ended("".join(texts), output_format="think+hermes"))

        assert [event["type"].removeprefix("response.") for event in events] == [
            *("created", "in_progress"),
            *("output_item.added", "content_part.added", "reasoning_text.delta"),
            *("reasoning_text.done", "content_part.done", "output_item.done"),
            *("output_item.added", "content_part.added", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done"),
            *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done", "completed"),
        ]
        assert list(state_of(events).values()) == [
            ("reasoning", "Hm."), ("message", "Yes."), ("function_call", '{"a": 1}'),
        ]  # fmt: skip


class TestGivenAChannelThatWasRewritten:
    """The server lost its last second, and another worker wrote the same tokens in other entries."""

    def test_when_a_reader_comes_back_amid_an_entry_then_it_gets_the_rest_of_it(self) -> None:
        lost, rewritten = channel("He", "llo ", "wor"), channel("Hello", " wo", "rld\N{LINE SEPARATOR}")
        text = "".join(rewritten)
        fold = ResponseEvents(INFO)
        seen = [*fold.begin(), *(event for piece in lost for event in fold.add(piece))]

        rest = events_of(rewritten, ended(text), seen[-2]["sequence_number"])

        assert [event["delta"] for event in rest if "delta" in event] == ["wo", "rld\N{LINE SEPARATOR}"]
        assert seen[-2]["sequence_number"] == STRIDE * len("Hello ")

    def test_when_the_output_is_another_then_it_is_not_continued(self) -> None:
        fold = ResponseEvents(INFO)
        fold.add("Hello")

        with pytest.raises(OutputChanged):
            fold.finish(ended("Goodbye"))


class TestGivenAFailedResponseWhoseOutputNobodyKept:
    @given(texts=pieces, number=st.integers(-1, 1600))
    def test_when_a_reader_is_in_it_then_it_gets_the_failure_after_its_number(
        self, texts: list[str], number: int
    ) -> None:
        fold = ResponseEvents(INFO, number)
        for text in texts:
            fold.add(text)

        events = fold.finish(ended("", (JobState.FAILED, None)))

        had_the_end = number % STRIDE == ENDED and number // STRIDE >= len("".join(texts))
        assert [event["type"] for event in events] == ([] if had_the_end else ["response.failed"])
        assert fold.last >= number
        assert all(event["sequence_number"] > number for event in events)


def channel(*texts: str) -> list[str]:
    """The text of entries, through their bytes."""
    return [decode_entry(encode_entry(start=i, token_ids=[i], text=t, time_ms=0)).text for i, t in enumerate(texts)]


class TestGivenTheKindsOfEnds:
    def kinds(self, texts: list[str], outcome: tuple[JobState, str | None]) -> list[str]:
        """The kinds of events."""
        events = events_of(texts, ended("".join(texts), outcome))
        return [event["type"].removeprefix("response.") for event in events]

    @pytest.mark.parametrize("texts", [["a"], []])
    def test_when_it_is_done_then_all_that_was_added_is_done(self, texts: list[str]) -> None:
        delta = ["output_text.delta"] * len(texts)

        assert self.kinds(texts, (JobState.DONE, "stop")) == [
            *("created", "in_progress", "output_item.added", "content_part.added", *delta),
            *("output_text.done", "content_part.done", "output_item.done", "completed"),
        ]

    def test_when_it_reached_its_length_then_it_is_incomplete(self) -> None:
        last = events_of(["a"], ended("a", (JobState.DONE, "length")))[-1]

        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["response"]["output"][0]["status"] == "incomplete"
        assert last["response"]["usage"]["total_tokens"] == 8

    def test_when_it_failed_then_its_output_is_not_done(self) -> None:
        kinds = self.kinds(["a"], (JobState.FAILED, None))

        assert kinds[-2:] == ["output_text.delta", "failed"]
        assert self.kinds([], (JobState.FAILED, None)) == ["created", "in_progress", "failed"]

    def test_when_it_was_cancelled_then_the_last_event_says_so(self) -> None:
        last = events_of(["a"], ended("a", (JobState.CANCELLED, None)))[-1]

        assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")


class TestGivenAJobThatExpired:
    def test_when_its_response_ends_then_its_error_says_why(self) -> None:
        end = response_end(JobState.EXPIRED, None, ("half", ""), None, (None, None))

        assert (end.status, end.text) == ("failed", "half")
        assert end.error == {"code": "server_error", "message": "the response has not ended within its time limit"}
