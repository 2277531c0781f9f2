"""Convert encoded results to columns of the table `results`, and these to results.

As objects, a result takes twenty times its bytes, and one may have 64 MiB. So a large one is converted position by
position, straight to JSON.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sluice.history.database import JsonText
from sluice.protocol.openai_format.logprobs import logprobs_from_json, logprobs_to_json
from sluice.protocol.packing import (
    Reading,
    as_bytes,
    as_int,
    as_ints,
    as_list,
    as_str,
    as_str_or_none,
    check_version,
    items_of,
    pack,
    unpack,
)
from sluice.protocol.wire import (
    ChoiceResult,
    JobResult,
    PromptResult,
    TokenLogprobs,
    Usage,
    decode_result,
    described,
    read_token_logprobs,
)

LARGE_BYTES = 1024 * 1024
MAX_JSON_BYTES = 128 * 1024 * 1024
"""A result whose JSON is larger is kept without its log-probabilities."""

# ASCII: a text of it takes one byte for each character, also inside of the database's driver.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_NO_LOGPROBS = pack(value=False)
_VECTOR, _PROMPT, _FORMAT = 2, 3, 4
"""Places in a choice after its log-probabilities."""


Row = dict[str, object]


def result_columns(data: bytes) -> Row:
    """Return the columns `choices` and `usage` of a result; also `record_error`, if a part of it is not kept.

    Raises:
        WireError, ValueError: not a result.
    """
    if len(data) <= LARGE_BYTES:
        return small_result_columns(decode_result(data))
    with Reading("result"):
        try:
            return large_result_columns(data)
        except _TooLong:
            why = f"its log-probabilities are not kept: as JSON they have over {MAX_JSON_BYTES} bytes"
            return large_result_columns(data, has_logprobs=False) | {"record_error": why}


def small_result_columns(result: JobResult) -> Row:
    """Return the columns of a result."""
    return {"choices": [_choice(choice) for choice in result.choices], "usage": _fields_of(result.usage)}


def large_result_columns(data: bytes, *, has_logprobs: bool = True) -> Row:
    """Return the same columns as `small_result_columns`, in little memory."""
    version, choices, usage, *_ = items_of(memoryview(data))
    check_version(unpack(version), "result")
    written = bytearray(b"[")
    for number, choice in enumerate(items_of(choices)):
        written += b"," * bool(number)
        for part in _choice_parts(choice, has_logprobs=has_logprobs):
            written += part.encode("ascii")
            if has_logprobs and len(written) > MAX_JSON_BYTES:
                raise _TooLong
    written += b"]"
    prompt_tokens, output_tokens, cached_tokens, *_ = map(as_int, as_list(unpack(usage)))
    counts = Usage(prompt_tokens=prompt_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens)
    return {"choices": JsonText(written.decode("ascii")), "usage": _fields_of(counts)}


def result_of(choices: Sequence[Mapping[str, Any]], usage: Mapping[str, int], *, model: str | None) -> JobResult:
    """Return the result whose columns these are."""
    return JobResult(choices=tuple(map(_choice_of, choices)), usage=Usage(**usage), model=model)


def _choice_of(written: Mapping[str, Any]) -> ChoiceResult:
    vector, prompt = written.get("vector"), written.get("prompt")
    return ChoiceResult(
        vector=None if vector is None else b64decode(vector),
        prompt=None if prompt is None else PromptResult(**_text_of(prompt), is_echoed=prompt["is_echoed"]),
        finish_reason=written.get("finish_reason"),
        format=written.get("format", ""),
        **_text_of(written),
    )


def _text_of(written: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "text": written["text"],
        "token_ids": tuple(written["token_ids"]),
        "logprobs": logprobs_from_json(written.get("logprobs")),
    }


class _TooLong(Exception):
    """The JSON of a result has more than `MAX_JSON_BYTES`."""


def _choice(choice: ChoiceResult) -> Row:
    prompt = None if choice.prompt is None else _text(choice.prompt)
    optional = {"vector": _base64(choice.vector), "prompt": prompt, "format": choice.format or None}
    return _known({**_text(choice), **optional})


def _text(of: ChoiceResult | PromptResult) -> Row:
    return _known({**_fields_of(of), "logprobs": logprobs_to_json(of.logprobs)})


def _base64(vector: bytes | None) -> str | None:
    return None if vector is None else b64encode(vector).decode()


def _choice_parts(choice: memoryview, *, has_logprobs: bool) -> Iterator[str]:
    """Yield the JSON of a choice in parts."""
    text, ids, reason, logprobs, *rest = items_of(choice)
    first: Row = {"finish_reason": as_str_or_none(unpack(reason))}
    if len(rest) > _VECTOR and (vector := unpack(rest[_VECTOR])):
        first["vector"] = _base64(as_bytes(vector))
    if len(rest) > _FORMAT:
        first["format"] = as_str(unpack(rest[_FORMAT]))
    yield from _text_parts([text, ids, logprobs, *rest], first, has_logprobs=has_logprobs)
    if len(rest) > _PROMPT and bytes(rest[_PROMPT][:1]) != _NO_LOGPROBS:
        text, ids, is_echoed, logprobs, *rest = items_of(rest[_PROMPT])
        yield ',"prompt":'
        first = {"is_echoed": bool(unpack(is_echoed))}
        yield from _text_parts([text, ids, logprobs, *rest], first, has_logprobs=has_logprobs)
        yield "}"
    yield "}"


def _text_parts(parts: Sequence[memoryview], first: Row, *, has_logprobs: bool) -> Iterator[str]:
    """Yield the JSON of a text and its log-probabilities in parts, without the brace at the end."""
    text, ids, logprobs, *tokens = parts
    token_ids = as_ints(unpack(ids))
    opened = _encode(_known({"text": as_str(unpack(text)), "token_ids": token_ids, **first}))[:-1]
    yield opened
    if not has_logprobs or bytes(logprobs[:1]) == _NO_LOGPROBS:
        return
    yield ',"logprobs":['
    positions = map(read_token_logprobs, map(unpack, items_of(logprobs)))
    if len(tokens) > 1 and (steps := as_list(unpack(tokens[0]))):
        positions = described(positions, token_ids, steps, as_list(unpack(tokens[1])))
    for number, at in enumerate(positions):
        yield f"{',' * bool(number)}{_position(at)}"
    yield "]"


def _position(at: TokenLogprobs) -> str:
    written = logprobs_to_json([at])
    assert written is not None, "there is one"
    return _encode(written[0])


def _fields_of(value: ChoiceResult | PromptResult | Usage) -> Row:
    """Return the fields as they are: `asdict` copies each token of an output."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _known(columns: Row) -> Row:
    return {name: value for name, value in columns.items() if value is not None}
