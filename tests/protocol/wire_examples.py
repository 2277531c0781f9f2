"""Messages of version 1, each with its bytes, which stay for ever once they are released."""

from collections.abc import Callable
from typing import Any

from sluice.protocol.states import JobState
from sluice.protocol.tools import ToolCall
from sluice.protocol.wire import (
    ChannelEntry,
    ChoiceResult,
    End,
    JobOptions,
    JobRecord,
    JobResult,
    JobSpec,
    Message,
    PromptResult,
    ResolvedOptions,
    TokenLogprobs,
    Usage,
    decode_entry,
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

USAGE = Usage(prompt_tokens=3, output_tokens=2, cached_tokens=1)


def encoded_entry(entry: ChannelEntry) -> bytes:
    """Encode an entry."""
    return encode_entry(**entry._asdict())


RESOLVED = ResolvedOptions(
    max_tokens=2048, temperature=2.0, top_p=0.8, top_k=20, min_p=0.0, repetition_penalty=1.0, end_token_ids=(2, 7)
)

# Any: messages of all kinds, and what encodes and decodes each
GOLDEN: list[tuple[str, Any, Any, Any]] = [
    ("9301a474657874a26869", "hi", encode_prompt, decode_prompt),
    ("9301a369647393010219", (1, 2, 25), encode_prompt, decode_prompt),
    (
        "9301a4636861749193a475736572a26869a3416461",
        (Message(role="user", content="hi", name="Ada"),),
        encode_prompt,
        decode_prompt,
    ),
    # Calls of tools, and the result of one.
    (
        "9301a4636861749295a9617373697374616e74a0c0c09193a163a166a27b7d96a4746f6f6ca178c0c0c0a163",
        (
            Message(role="assistant", content="", tool_calls=(ToolCall(id="c", name="f", arguments="{}"),)),
            Message(role="tool", content="x", tool_call_id="c"),
        ),
        encode_prompt,
        decode_prompt,
    ),
    (
        "920183a5746f6f6c7391ac7b226e616d65223a2266227dab746f6f6c5f63686f696365a87265717569726564"
        "b3706172616c6c656c5f746f6f6c5f63616c6c73c2",
        JobSpec(tools=('{"name":"f"}',), tool_choice="required", parallel_tool_calls=False),
        encode_spec,
        decode_spec,
    ),
    (
        "920181a76f7074696f6e7381aa7374727563747572656481a57265676578a35b615d",
        JobSpec(options=JobOptions(structured={"regex": "[a]"})),
        encode_spec,
        decode_spec,
    ),
    ("920180", JobSpec(), encode_spec, decode_spec),
    ("920181a761735f63686174c3", JobSpec(as_chat=True), encode_spec, decode_spec),
    (
        "920183a673747265616dc2a86d6574616461746181a161a162a76f7074696f6e7382aa6d61785f746f6b656e7305a473746f7091a10a",
        JobSpec(options=JobOptions(max_tokens=5, stop=("\n",)), metadata={"a": "b"}, stream=False),
        encode_spec,
        decode_spec,
    ),
    # Values that a producer states though they are what most models leave them at.
    (
        "920181a76f7074696f6e7382ab74656d7065726174757265cb3ff0000000000000a5746f705f6b00",
        JobSpec(options=JobOptions(temperature=1.0, top_k=0)),
        encode_spec,
        decode_spec,
    ),
    (
        "920185a56d6f64656ca16da86d6574616461746181a9637573746f6d5f6964a131ac63616c6c6261636b5f75726c"
        "b568747470733a2f2f6578616d706c652e636f6d2f78a56261746368a162a76f7074696f6e7386aa6d61785f746f6b656e7309"
        "ab74656d7065726174757265cb3fe0000000000000a473746f7092a161a2c3a9a86c6f6770726f627302a16e02"
        "aa6c6f6769745f62696173919205cb3ff8000000000000",
        JobSpec(
            options=JobOptions(max_tokens=9, temperature=0.5, stop=("a", "é"), logit_bias={5: 1.5}, logprobs=2, n=2),
            model="m",
            metadata={"custom_id": "1"},
            callback_url="https://example.com/x",
            batch="b",
        ),
        encode_spec,
        decode_spec,
    ),
    ("9801cd080002cb3fe99999999999" + "9a140001920207", RESOLVED, encode_resolved, decode_resolved),
    (
        "9701039104a2c3a9ce499602d2c2c2",
        ChannelEntry(start=3, token_ids=(4,), text="é", time_ms=1234567890),
        encoded_entry,
        decode_entry,
    ),
    (
        "9701049" + "0a005c282a5" + "7374617465a4646f6e65ad66696e6973685f726561736f6ea473746f70",
        ChannelEntry(start=4, token_ids=(), text="", time_ms=5, end=End(state=JobState.DONE, finish_reason="stop")),
        encoded_entry,
        decode_entry,
    ),
    (
        "97010590a001c282a57374617465a4646f6e65a5757361676593030201",
        ChannelEntry(start=5, token_ids=(), text="", time_ms=1, end=End(state=JobState.DONE, usage=USAGE)),
        encoded_entry,
        decode_entry,
    ),
    (
        "9401919" + "4a26869920102a473746f70c2930302" + "01a16d",
        JobResult(choices=(ChoiceResult(text="hi", token_ids=(1, 2), finish_reason="stop"),), usage=USAGE, model="m"),
        encode_result,
        decode_result,
    ),
    # Of text with marks.
    (
        "9a01009104a16109c2c29090a66865726d6573",
        ChannelEntry(start=0, token_ids=(4,), text="a", time_ms=9, format="hermes"),
        encoded_entry,
        decode_entry,
    ),
    (
        "94019199a1619104a473746f709191cbbfe000000000000091009204c40161c2c2ac7468696e6b2b6865726d657393030201c0",
        JobResult(
            choices=(
                ChoiceResult(
                    text="a",
                    token_ids=(4,),
                    finish_reason="stop",
                    logprobs=(TokenLogprobs(chosen=-0.5, token=b"a", offset=0),),
                    format="think+hermes",
                ),
            ),
            usage=USAGE,
        ),
        encode_result,
        decode_result,
    ),
    # Of workers that send no bytes and no offsets of tokens.
    (
        "9701039104a161099193cbbfe000000000000004cbbfe0000000000000c2",
        ChannelEntry(
            start=3, token_ids=(4,), text="a", time_ms=9, logprobs=(TokenLogprobs(chosen=-0.5, top=((4, -0.5),)),)
        ),
        encoded_entry,
        decode_entry,
    ),
    (
        "990103920405a1780992"
        "95cbbfe000000000000004cbbfe000000000000009cbbff8000000000000"
        "91cbbfd0000000000000"
        "c2" + "920700" + "9604c402f09f" + "09c40161" + "05c402988a",
        ChannelEntry(
            start=3,
            token_ids=(4, 5),
            text="x",
            time_ms=9,
            logprobs=(
                TokenLogprobs(
                    chosen=-0.5,
                    top=((4, -0.5), (9, -1.5)),
                    token=b"\xf0\x9f",
                    top_tokens=(b"\xf0\x9f", b"a"),
                    offset=7,
                ),
                TokenLogprobs(chosen=-0.25, token=b"\x98\x8a", offset=7),
            ),
        ),
        encoded_entry,
        decode_entry,
    ),
    (
        "9401" + "91" + "96" + "a16f" + "920405" + "c0" + "92" + "91cbbfe0000000000000" + "91cbbfd0000000000000"
        "92c001" + "9205c4016f" + "93030201" + "c0",
        JobResult(
            choices=(
                ChoiceResult(
                    text="o",
                    token_ids=(4, 5),
                    finish_reason=None,
                    logprobs=(TokenLogprobs(chosen=-0.5), TokenLogprobs(chosen=-0.25, token=b"o", offset=1)),
                ),
            ),
            usage=USAGE,
        ),
        encode_result,
        decode_result,
    ),
    (
        "9401" + "91" + "98" + "a0" + "90" + "a66c656e677468" + "c2" + "9090" + "c4040000803f"
        "96"
        + "a26162"
        + "920405"
        + "c3"
        + "9291cb000000000000000091cbbfe0000000000000"
        + "920001"
        + "9404c4016105c40162"
        "93020000" + "c0",
        JobResult(
            choices=(
                ChoiceResult(
                    text="",
                    token_ids=(),
                    finish_reason="length",
                    vector=b"\0\0\x80?",
                    prompt=PromptResult(
                        text="ab",
                        token_ids=(4, 5),
                        is_echoed=True,
                        logprobs=(
                            TokenLogprobs(chosen=0.0, token=b"a", offset=0),
                            TokenLogprobs(chosen=-0.5, token=b"b", offset=1),
                        ),
                    ),
                ),
            ),
            usage=Usage(prompt_tokens=2, output_tokens=0),
        ),
        encode_result,
        decode_result,
    ),
    (
        "920182a56d6f64656ca16dae66697273745f746f6b656e5f6d7307",
        JobRecord(model="m", first_token_ms=7),
        encode_record,
        decode_record,
    ),
    (
        "920183ab707265656d7074696f6e7302ac707265656d707465645f6d7319b0707265656d7074696f6e5f74696d657392922819925ac0",
        JobRecord(preemptions=2, preemption_times=((40, 25), (90, None)), preempted_ms=25),
        encode_record,
        decode_record,
    ),
    (
        "920181a87265736f6c76656497cd080002cb3fe99999999999" + "9a140001920207",
        JobRecord(resolved=RESOLVED),
        encode_record,
        decode_record,
    ),
]


def golden_bytes(decode: Callable[[bytes], object]) -> list[bytes]:
    """Return the bytes of all messages of one kind."""
    return [bytes.fromhex(golden) for golden, _, _, one in GOLDEN if one is decode]
