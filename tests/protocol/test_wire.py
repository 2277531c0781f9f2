"""The messages: golden bytes, newer versions, limits in both directions, and any value there and back."""

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol import limits
from sluice.protocol.errors import InvalidJob
from sluice.protocol.job_ids import check_tenant, split_job_id
from sluice.protocol.packing import pack, pack_for_script, unpack
from sluice.protocol.states import JobState
from sluice.protocol.wire import (
    ChannelEntry,
    ChoiceResult,
    End,
    JobId,
    JobOptions,
    JobRecord,
    JobResult,
    JobSpec,
    Message,
    OutboxEvent,
    ResolvedOptions,
    TokenLogprobs,
    Usage,
    WireError,
    decode_entry,
    decode_events,
    decode_prompt,
    decode_record,
    decode_resolved,
    decode_result,
    decode_spec,
    encode_entry,
    encode_prompt,
    encode_record,
    encode_resolved,
    encode_result,
    encode_spec,
)
from tests.examples import examples
from tests.protocol.wire_examples import GOLDEN, RESOLVED, encoded_entry

DECODERS = [
    decode_prompt, decode_spec, decode_entry, decode_result, decode_record, decode_resolved, decode_events,
]  # fmt: skip


class TestGivenMessagesOfVersion1:
    @pytest.mark.parametrize(("golden", "value", "encode", "decode"), GOLDEN)
    def test_when_they_are_read_and_written_then_the_bytes_are_those_of_then(
        self, golden: str, value: Any, encode: Any, decode: Any
    ) -> None:
        assert decode(bytes.fromhex(golden)) == value
        assert encode(value).hex() == golden

    def test_when_a_newer_program_added_parts_then_they_are_ignored(self) -> None:
        entry = pack([1, 0, [5], "x", 9, False, False, "new", {"more": 1}])
        spec = pack([1, {"model": "m", "colour": "red", "options": {"max_tokens": 3, "mood": 1}}, "new"])
        record = pack([1, {"model": "m", "watts": 3}])

        assert decode_entry(entry) == ChannelEntry(start=0, token_ids=(5,), text="x", time_ms=9)
        assert decode_spec(spec) == JobSpec(model="m", options=JobOptions(max_tokens=3))
        assert decode_record(record) == JobRecord(model="m")


class TestGivenLogprobsWithTokens:
    @pytest.mark.parametrize(
        "tokens",
        [
            ([0], [4, "a"]),
            ([0], [4]),
            ([0], ["4", b"a"]),
            ([0, 1], [4, b"a"]),
            ([0.5], [4, b"a"]),
            (["a"], []),
            ("a", []),
            ([], 4),
        ],
    )
    def test_when_they_are_damaged_then_it_is_a_wire_error(self, tokens: tuple[object, object]) -> None:
        with pytest.raises(WireError, match="not a channel entry"):
            decode_entry(pack([1, 0, [4], "a", 9, [[-0.5]], False, *tokens]))


class TestGivenANewerVersion:
    @pytest.mark.parametrize("decode", DECODERS[:-1])
    def test_when_it_is_read_then_the_error_says_to_update(self, decode: Any) -> None:
        with pytest.raises(WireError, match="version 2"):
            decode(pack([2, "", 0, 0, 0, 0, 0, 0]))


class TestGivenBytesThatAreNoMessage:
    @pytest.mark.parametrize("decode", DECODERS)
    @pytest.mark.parametrize(
        "data",
        [b"", b"\xc1", b"hello", b"\x93\x01", pack({}), pack([]), pack([0]), pack([True, 1, 2, 3, 4, 5, 6, 7]),
         pack([1]), pack([1, 2, 3, 4, 5, 6, 7]), b"\x91" * 2000, b"\x81\x91\x01\x01",
         pack([1, b"\xff", b"\xff", 3, 4, 5, 6])],
    )  # fmt: skip
    def test_when_they_are_read_then_it_is_a_wire_error(self, decode: Any, data: bytes) -> None:
        if decode is decode_events and data == pack([]):
            return
        with pytest.raises(WireError):
            decode(data)

    @settings(max_examples=examples(300))
    @given(st.binary(max_size=200), st.sampled_from(DECODERS))
    def test_when_they_are_any_bytes_then_they_are_read_or_refused(self, data: bytes, decode: Any) -> None:
        with suppress(WireError):
            decode(data)

    @settings(max_examples=examples(300))
    @given(st.data(), st.sampled_from(DECODERS))
    def test_when_they_are_any_values_in_a_frame_then_they_are_read_or_refused(
        self, data: st.DataObject, decode: Any
    ) -> None:
        leaf = (
            st.none()
            | st.booleans()
            | st.integers(-3, 2**40)
            | st.floats()
            | st.text(max_size=3)
            | st.binary(max_size=3)
        )
        names = st.sampled_from(["options", "state", "stop", "max_tokens", "metadata", "logit_bias", "usage", "model"])
        value = st.recursive(
            leaf, lambda v: st.lists(v, max_size=4) | st.dictionaries(names, v, max_size=4), max_leaves=12
        )
        message = data.draw(st.lists(value, min_size=1, max_size=7))
        with suppress(WireError):
            decode(pack([1, *message]))


class TestGivenAJobThatAsksTooMuch:
    @pytest.mark.parametrize(
        ("options", "word"),
        [
            ({"temperature": -0.1}, "temperature"),
            ({"temperature": math.inf}, "temperature"),
            ({"temperature": "0.5"}, "temperature"),
            ({"top_p": 0}, "top_p"),
            ({"top_p": 1.01}, "top_p"),
            ({"top_k": -1}, "top_k"),
            ({"min_p": 2}, "min_p"),
            ({"repetition_penalty": 0}, "repetition_penalty"),
            ({"frequency_penalty": 3}, "frequency_penalty"),
            ({"presence_penalty": -3}, "presence_penalty"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"max_tokens": 1.5}, "max_tokens"),
            ({"max_tokens": True}, "max_tokens"),
            ({"max_tokens": limits.MAX_TOKENS + 1}, "max_tokens"),
            ({"min_tokens": 300, "max_tokens": 256}, "min_tokens"),
            ({"n": 0}, "n must"),
            ({"n": limits.MAX_CHOICES + 1}, "n must"),
            ({"logprobs": limits.MAX_LOGPROBS + 1}, "logprobs"),
            ({"stop": "abc"}, "stop"),
            ({"stop": ("",)}, "stop"),
            ({"stop": ("\ud800",)}, "stop"),
            ({"stop": ("x" * (limits.MAX_STOP_CHARS + 1),)}, "stop"),
            ({"stop": ("x",) * (limits.MAX_STOPS + 1)}, "stop"),
            ({"stop_token_ids": (-1,)}, "stop_token_ids"),
            ({"stop_token_ids": tuple(range(limits.MAX_STOP_TOKEN_IDS + 1))}, "stop_token_ids"),
            ({"logit_bias": {5: 101}}, "logit_bias"),
            ({"logit_bias": {"5": 1}}, "logit_bias"),
            ({"logit_bias": dict.fromkeys(range(limits.MAX_LOGIT_BIAS + 1), 1.0)}, "logit_bias"),
            ({"ignore_eos": 1}, "ignore_eos"),
        ],
    )
    def test_when_options_are_out_of_range_then_the_sentence_names_them(
        self, options: dict[str, Any], word: str
    ) -> None:
        with pytest.raises(InvalidJob, match=word):
            JobOptions(**options)

    @pytest.mark.parametrize(
        ("spec", "word"),
        [
            ({"metadata": {str(i): "" for i in range(limits.MAX_METADATA_PAIRS + 1)}}, "metadata"),
            ({"metadata": {"k" * (limits.MAX_METADATA_KEY_CHARS + 1): ""}}, "metadata key"),
            ({"metadata": {"k": "v" * (limits.MAX_METADATA_VALUE_CHARS + 1)}}, "metadata value"),
            ({"metadata": {"k": 3}}, "metadata value"),
            ({"callback_url": "ftp://x"}, "callback_url"),
            ({"callback_url": "https://" + "x" * limits.MAX_URL_CHARS}, "callback_url"),
            ({"batch": "no spaces"}, "batch"),
            ({"model": ""}, "model"),
            ({"traceparent": "x" * 200}, "traceparent"),
            ({"stream": "yes"}, "stream"),
            ({"as_chat": 1}, "as_chat"),
        ],
    )
    def test_when_a_spec_is_out_of_range_then_the_sentence_names_it(self, spec: dict[str, Any], word: str) -> None:
        with pytest.raises(InvalidJob, match=word):
            JobSpec(**spec)

    @pytest.mark.parametrize(
        ("prompt", "word"),
        [
            ("", "empty"),
            ((), "empty"),
            ("\ud800", "UTF-8"),
            ((1, -2), "token ids"),
            ((1, 2**31), "token ids"),
            (({"role": "user"},), "messages"),
            (5, "text"),
            ("x" * limits.MAX_PROMPT_BYTES, "bytes"),
        ],
    )
    def test_when_a_prompt_cannot_be_read_by_any_model_then_it_is_refused(self, prompt: Any, word: str) -> None:
        with pytest.raises(InvalidJob, match=word):
            encode_prompt(prompt)

    def test_when_a_role_is_unknown_then_it_is_refused(self) -> None:
        role: Any = "robot"
        with pytest.raises(InvalidJob, match="role"):
            Message(role=role, content="hi")

    def test_when_bytes_ask_for_what_no_producer_may_then_the_reader_refuses_them(self) -> None:
        with pytest.raises(WireError, match="temperature"):
            decode_spec(pack([1, {"options": {"temperature": -1}}]))
        with pytest.raises(WireError, match="empty"):
            decode_prompt(pack([1, "text", ""]))
        with pytest.raises(WireError, match="at most"):
            decode_prompt(b"\x00" * (limits.MAX_PROMPT_BYTES + 1))

    @pytest.mark.parametrize("value", [2.0**53, 1e20, 1e300, math.inf])
    def test_when_a_resolved_option_has_any_size_then_it_is_written(self, value: float) -> None:
        assert unpack(encode_resolved(replace(RESOLVED, temperature=value)))[2] == value

    @pytest.mark.parametrize(
        ("index", "value", "word"),
        [
            (1, limits.MAX_TOKENS + 1, "max_tokens"), (1, -1, "max_tokens"), (1, None, "whole number"),
            (2, -0.5, "temperature"), (2, 1e20, "temperature"), (3, 0, "top_p"), (4, -1, "top_k"), (5, 2, "min_p"),
            (6, 0, "repetition_penalty"), (6, 1e20, "repetition_penalty"), (6, math.nan, "finite"),
            (7, [-1], "token id"), (7, [2**31], "token id"),
        ],
    )  # fmt: skip
    def test_when_resolved_options_ask_for_what_no_request_may_then_they_are_refused(
        self, index: int, value: object, word: str
    ) -> None:
        parts: list[object] = [1, 9, 0.5, 0.9, 5, 0, 1.1, [2]]
        parts[index] = value

        with pytest.raises(WireError, match=word):
            decode_resolved(pack(parts))

    def test_when_an_entry_or_result_is_too_large_then_it_is_not_written(self) -> None:
        text = "x" * limits.MAX_ENTRY_BYTES
        with pytest.raises(WireError, match="channel entry"):
            encode_entry(start=0, token_ids=(), text=text, time_ms=0)


# ---------------------------------------------------------------- any value, there and back

texts = st.text(max_size=20).filter(lambda text: "\ud800" not in text)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(tuple)
floats = st.floats(allow_nan=False, allow_infinity=False)
tops = st.lists(st.tuples(st.integers(0, 2**31 - 1), floats), max_size=3).map(tuple)
logprobs = st.builds(TokenLogprobs, chosen=floats, top=tops)


def bytes_of(token_id: int) -> bytes | None:
    """What a token is; a third of them are nothing."""
    return [None, b"a", b"\xf0\x9f"][token_id % 3]


@st.composite
def outputs(draw: st.DrawFn) -> dict[str, Any]:
    """Token ids and, for some of them, log-probabilities with bytes and offsets."""
    token_ids, offset = draw(ids), st.none() | st.integers(0, 2**40)
    described: list[TokenLogprobs] = []
    for token_id in token_ids:
        top = draw(tops)
        top_tokens = tuple(bytes_of(other) for other, _ in top)
        described.append(
            TokenLogprobs(
                chosen=draw(floats),
                top=top,
                token=bytes_of(token_id),
                top_tokens=top_tokens if any(top_tokens) else (),
                offset=draw(offset),
            )
        )
    plain = draw(st.none() | st.lists(logprobs, min_size=len(token_ids), max_size=len(token_ids)).map(tuple))
    return {"token_ids": token_ids, "logprobs": draw(st.sampled_from([plain, tuple(described)]))}


usages = st.builds(
    Usage, prompt_tokens=st.integers(0, 2**40), output_tokens=st.integers(0, 9), cached_tokens=st.integers(0, 9)
)
ends = st.builds(
    End,
    state=st.sampled_from(JobState),
    finish_reason=st.none() | texts,
    error=st.none() | texts,
    error_code=st.none() | texts,
    usage=st.none() | usages,
)
entries = st.builds(
    ChannelEntry,
    start=st.integers(0, 2**40),
    token_ids=ids,
    text=texts,
    time_ms=st.integers(0, 2**43),
    end=st.none() | ends,
)
options = st.builds(
    JobOptions,
    max_tokens=st.none() | st.integers(10, 1000),
    min_tokens=st.integers(0, 10),
    temperature=st.none() | st.just(1.0) | st.floats(0, 5),
    top_p=st.none() | st.just(1.0) | st.floats(0.01, 1),
    top_k=st.none() | st.integers(0, 99),
    min_p=st.none() | st.floats(0, 1),
    repetition_penalty=st.none() | st.floats(0.1, 3),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=4),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=4).map(tuple),
    stop_token_ids=ids,
    logprobs=st.none() | st.integers(0, 20),
    n=st.integers(1, 8),
    ignore_eos=st.booleans(),
)
specs = st.builds(
    JobSpec,
    options=options,
    stream=st.booleans(),
    as_chat=st.booleans(),
    model=st.none() | st.text(min_size=1, max_size=9),
    metadata=st.dictionaries(st.text(min_size=1, max_size=5), texts, max_size=4),
    callback_url=st.none() | st.just("https://example.org/x"),
    batch=st.none() | st.just("night-1"),
)
choices = st.builds(
    ChoiceResult,
    text=texts,
    token_ids=ids,
    finish_reason=st.none() | texts,
)
results = st.builds(JobResult, choices=st.lists(choices, max_size=3).map(tuple), usage=usages, model=st.none() | texts)
resolved = st.builds(
    ResolvedOptions,
    max_tokens=st.integers(1, 10**6),
    temperature=st.floats(0, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 99),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.1, 3),
    end_token_ids=ids,
)
records = st.builds(
    JobRecord,
    resolved=st.none() | resolved,
    model=st.none() | texts,
    prompt_tokens=st.none() | st.integers(0, 99),
    resumed_tokens=st.integers(0, 99),
    itl_p50_ms=st.none() | floats,
    preemption_times=st.lists(st.tuples(st.integers(0, 2**53), st.none() | st.integers(0, 99)), max_size=16).map(tuple),
)
messages = st.builds(Message, role=st.sampled_from(["system", "user", "tool"]), content=texts, name=st.none() | texts)
prompts = (
    st.text(min_size=1, max_size=30)
    | st.lists(messages, min_size=1, max_size=3).map(tuple)
    | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9).map(tuple)
)


class TestGivenAnyValue:
    @given(prompts)
    def test_when_a_prompt_goes_there_and_back_then_it_is_the_same(self, prompt: Any) -> None:
        assert decode_prompt(encode_prompt(prompt)) == prompt

    @given(specs)
    def test_when_a_spec_goes_there_and_back_then_it_is_the_same(self, spec: JobSpec) -> None:
        assert decode_spec(encode_spec(spec)) == spec

    @given(entries, outputs())
    def test_when_an_entry_goes_there_and_back_then_it_is_the_same(
        self, entry: ChannelEntry, output: dict[str, Any]
    ) -> None:
        entry = entry._replace(**output)

        assert decode_entry(encoded_entry(entry)) == entry

    @given(results, st.lists(outputs(), max_size=3))
    def test_when_a_result_goes_there_and_back_then_it_is_the_same(
        self, result: JobResult, outputs: list[dict[str, Any]]
    ) -> None:
        of_choices = zip(result.choices, outputs, strict=False)
        result = replace(result, choices=tuple(replace(choice, **output) for choice, output in of_choices))

        assert decode_result(encode_result(result)) == result

    @given(resolved)
    def test_when_resolved_options_go_there_and_back_then_they_are_the_same(self, options: ResolvedOptions) -> None:
        assert decode_resolved(encode_resolved(options)) == options

    @given(records)
    def test_when_a_record_goes_there_and_back_then_it_is_the_same(self, record: JobRecord) -> None:
        assert decode_record(encode_record(record)) == record


class TestGivenJobIds:
    @pytest.mark.parametrize("tenant", ["", "Acme", "a b", "a.b", "a:b", "x" * 65, "é"])
    def test_when_a_tenant_cannot_be_part_of_a_key_then_it_is_refused(self, tenant: str) -> None:
        with pytest.raises(InvalidJob, match="tenant"):
            check_tenant(tenant)

    @pytest.mark.parametrize(
        "job_id", ["", "0.t", "0.t.", "x.t.a", "0.T.a", "0.t.a.b", "0.t.a:b", "0.t.a\n", "0.t." + "x" * 65]
    )
    def test_when_a_text_is_no_job_id_then_it_is_a_wire_error(self, job_id: str) -> None:
        with pytest.raises(WireError, match="not a job id"):
            split_job_id(job_id)


class TestGivenEvents:
    def test_when_a_script_packed_them_then_text_is_bytes_and_names_are_text(self) -> None:
        data = pack_for_script([["ended", "0.t.a", 3, 9, {"state": b"done", "record": b"\xff\x00", "epoch": 2}]])

        assert decode_events(data) == [
            OutboxEvent(
                kind="ended",
                job_id=JobId("0.t.a"),
                version=3,
                at_ms=9,
                fields={"state": b"done", "record": b"\xff\x00", "epoch": 2},
            )
        ]


class TestGivenMessagesThatAreValues:
    def test_when_one_is_replaced_then_it_checks_itself_again(self) -> None:
        with pytest.raises(InvalidJob, match="top_p"):
            replace(JobOptions(), top_p=7)
