"""Encoding and decoding of messages: msgpack, the version first. No I/O.

Every message is an array that begins with the version. A reader accepts its own version and all lower ones, rejects
newer ones, and ignores fields after those it knows. These bytes are opaque to scripts, except the `model` of a spec;
only `calls/` packs data that a script unpacks. docs/reference/wire-format.md draws every message.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from math import isfinite
from typing import Any, cast

from sluice.protocol import limits
from sluice.protocol.checks import is_token_id
from sluice.protocol.errors import InvalidJob, WireError
from sluice.protocol.messages import (
    ChannelEntry,
    ChoiceResult,
    End,
    EventKind,
    JobId,
    JobRecord,
    JobResult,
    JobSpec,
    Message,
    OutboxEvent,
    Prompt,
    PromptResult,
    Role,
    TokenLogprobs,
    Usage,
    check_prompt,
)
from sluice.protocol.packing import (
    WIRE_VERSION,
    Reading,
    as_bytes,
    as_float,
    as_int,
    as_ints,
    as_list,
    as_str,
    as_str_or_none,
    bounded,
    changed_fields,
    known_fields,
    open_message,
    packed,
    unpack_from_script,
)
from sluice.protocol.sampling import DEFAULTS, NEUTRAL, JobOptions, ResolvedOptions
from sluice.protocol.states import JobState
from sluice.protocol.tools import ToolCall

__all__ = [
    "WIRE_VERSION",
    "ChannelEntry",
    "ChoiceResult",
    "End",
    "EventKind",
    "JobId",
    "JobOptions",
    "JobRecord",
    "JobResult",
    "JobSpec",
    "Message",
    "OutboxEvent",
    "Prompt",
    "PromptResult",
    "ResolvedOptions",
    "Role",
    "TokenLogprobs",
    "Usage",
    "WireError",
    "decode_entry",
    "decode_events",
    "decode_prompt",
    "decode_record",
    "decode_resolved",
    "decode_result",
    "decode_spec",
    "encode_entry",
    "encode_prompt",
    "encode_record",
    "encode_resolved",
    "encode_result",
    "encode_spec",
]


_READING_ENTRY = Reading("channel entry")
_NO_TOKENS: tuple[list[object], list[object]] = ([], [])
"""In the place of the tokens of log-probabilities, if other parts follow."""

# ---------------------------------------------------------------- prompt


def encode_prompt(prompt: Prompt) -> bytes:
    """Pack a prompt.

    Raises:
        InvalidJob: the prompt is empty, not UTF-8, of the wrong type, or too large.
    """
    check_prompt(prompt)
    data = packed([WIRE_VERSION, *_prompt_parts(prompt)])
    if len(data) > limits.MAX_PROMPT_BYTES:
        raise InvalidJob(f"the prompt is {len(data)} bytes when encoded; at most {limits.MAX_PROMPT_BYTES} are taken")
    return data


def _prompt_parts(prompt: Prompt) -> tuple[str, object]:
    if isinstance(prompt, str):
        return "text", prompt
    if isinstance(prompt[0], Message):
        # check_prompt has verified that all items are of one kind, which the type checker cannot see.
        messages = cast("tuple[Message, ...]", prompt)
        return "chat", list(map(_message_parts, messages))
    return "ids", list(prompt)


def _message_parts(message: Message) -> list[object]:
    """Return the parts of a message, without those at the end that it lacks."""
    parts: list[object] = [message.role, message.content, message.name, message.reasoning]
    parts += [[[call.id, call.name, call.arguments] for call in message.tool_calls] or None, message.tool_call_id]
    while parts[-1] is None:
        del parts[-1]
    return parts


def _read_message(parts: Sequence[Any]) -> Message:  # Any: Message checks each part
    role, content, *rest = parts
    name, reasoning, calls, tool_call_id, *_ = [*rest, *[None] * 4]
    tool_calls = tuple(ToolCall(id=call[0], name=call[1], arguments=call[2]) for call in calls or ())
    return Message(
        role=role, content=content, name=name, reasoning=reasoning, tool_calls=tool_calls, tool_call_id=tool_call_id
    )


def decode_prompt(data: bytes) -> Prompt:
    """Unpack a prompt.

    Raises:
        WireError: the data has an unknown version, exceeds a limit, or is not a valid prompt.
    """
    _, kind, value, *_ = open_message(data, "prompt", limits.MAX_PROMPT_BYTES, at_least=3)
    with Reading("prompt"):
        prompt = _read_prompt(kind, value)
        check_prompt(prompt)
    return prompt


def _read_prompt(kind: str, value: Sequence[Any]) -> Prompt:  # Any: not checked yet; check_prompt does it
    match kind:
        case "text":
            return as_str(value)
        case "chat":
            return tuple(map(_read_message, value))
        case "ids":
            return tuple(value)
        case _:
            raise WireError(f"a prompt of an unknown kind: {kind!r}")


# ---------------------------------------------------------------- job spec


def encode_spec(spec: JobSpec, *, without: Collection[str] = ()) -> bytes:
    """Pack the options and metadata of a job, without default values and values left to the model.

    Args:
        spec: The options and metadata.
        without: Fields that are packed as if they had their defaults.

    Raises:
        InvalidJob: the packed spec is too large.
    """
    values = _spec_values(spec)
    data = packed([WIRE_VERSION, {name: value for name, value in values.items() if name not in without}])
    if len(data) > limits.MAX_SPEC_BYTES:
        raise InvalidJob(f"options and metadata are {len(data)} bytes; at most {limits.MAX_SPEC_BYTES} are taken")
    return data


def _spec_values(spec: JobSpec) -> dict[str, object]:
    values = changed_fields(spec, skip="options")
    options = changed_fields(spec.options, skip="logit_bias")
    if spec.options.logit_bias:
        options["logit_bias"] = [[token_id, bias] for token_id, bias in spec.options.logit_bias.items()]
    return values | {"options": options} if options else values


def decode_spec(data: bytes) -> JobSpec:
    """Unpack the options and metadata of a job; unknown names are ignored.

    Raises:
        WireError: the data has an unknown version, or a value is out of its range.
    """
    values = open_message(data, "job spec", limits.MAX_SPEC_BYTES, at_least=2)[1]
    with Reading("job spec"):
        # Any: the dataclass checks each value.
        options: dict[str, Any] = known_fields(JobOptions, values.get("options", {}))
        options |= {name: tuple(value) for name, value in options.items() if isinstance(DEFAULTS[name], tuple)}
        if "logit_bias" in options:
            options["logit_bias"] = dict(options["logit_bias"])
        fields_of_spec = known_fields(JobSpec, values)
        fields_of_spec["options"] = JobOptions(**options)
        if "tools" in fields_of_spec:
            fields_of_spec["tools"] = tuple(fields_of_spec["tools"])
        return JobSpec(**fields_of_spec)


# ---------------------------------------------------------------- resolved options


@lru_cache(maxsize=64)
def encode_resolved(resolved: ResolvedOptions) -> bytes:
    """Pack the options that a job's first attempt resolved. Cached because jobs often share them."""
    return packed([WIRE_VERSION, *_resolved_parts(resolved)])


def decode_resolved(data: bytes) -> ResolvedOptions:
    """Unpack the options that a job's first attempt resolved.

    Raises:
        WireError: the data has an unknown version, or a value that no request may have.
    """
    message = open_message(data, "set of resolved options", limits.MAX_SPEC_BYTES, at_least=8)
    with Reading("set of resolved options"):
        return _read_resolved(message[1:])


@lru_cache(maxsize=64)
def _resolved_parts(resolved: ResolvedOptions) -> tuple[object, ...]:
    # Integers take fewer bytes. A job's hash needs a third of the memory while no value has more than 64 bytes.
    return (*(_shortest(getattr(resolved, name)) for name in NEUTRAL), resolved.end_token_ids)


def _shortest(number: float) -> float:
    """Return a float without a fraction as an integer, if msgpack can represent it."""
    return int(number) if abs(number) <= limits.MAX_NUMBER and number == int(number) else float(number)


def _read_resolved(parts: object) -> ResolvedOptions:
    numbers = as_list(parts)[: len(NEUTRAL)]
    end_token_ids = as_ints(as_list(parts)[len(NEUTRAL)])
    # Any: numbers of both types. Whole ones stand for both on the wire.
    values: dict[str, Any] = {
        name: as_int(number) if isinstance(neutral, int) else _finite(number)
        for (name, neutral), number in zip(NEUTRAL.items(), numbers, strict=True)
    }
    # Options check their ranges when they are created; a user who may submit may also write into its jobs' hashes.
    JobOptions(**values)
    if not all(map(is_token_id, end_token_ids)):
        raise WireError("an end token is not a token id")
    return ResolvedOptions(**values, end_token_ids=end_token_ids)


def _finite(value: object) -> float:
    if not isfinite(number := as_float(value)):
        raise WireError(f"expected a finite number, got {number}")
    return number


# ---------------------------------------------------------------- channel


def encode_entry(  # noqa: PLR0913  # the fields of an entry
    *,
    start: int,
    token_ids: Sequence[int],
    text: str,
    time_ms: int,
    logprobs: Sequence[TokenLogprobs] | None = None,
    end: End | None = None,
    format: str = "",
) -> bytes:
    """Pack one channel entry from the fields of `ChannelEntry`, so that no object is created per choice and step.

    Raises:
        WireError: the packed message is too large.
    """
    packed_end = False if end is None else _end_parts(end)
    packed_logprobs = False if logprobs is None else [_logprobs_parts(position) for position in logprobs]
    message: tuple[object, ...] = (WIRE_VERSION, start, token_ids, text, time_ms, packed_logprobs, packed_end)
    if logprobs or format:
        message += _trailing_parts(token_ids, logprobs, format)
    return bounded(packed(message), "channel entry", limits.MAX_ENTRY_BYTES)


def decode_entry(data: bytes) -> ChannelEntry:
    """Unpack one channel entry.

    Raises:
        WireError: the data has an unknown version, or is not a channel entry.
    """
    message = open_message(data, "channel entry", limits.MAX_ENTRY_BYTES, at_least=7)
    with _READING_ENTRY:
        _, start, token_ids, text, time_ms, logprobs, end, *rest = message
        return ChannelEntry(
            start=as_int(start),
            token_ids=as_ints(token_ids),
            text=as_str(text),
            time_ms=as_int(time_ms),
            logprobs=_read_logprobs(logprobs, token_ids, rest),
            end=_read_end(end) if end else None,
            format=as_str(rest[2]) if len(rest) > 2 else "",
        )


def _trailing_parts(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, format: str
) -> tuple[object, ...]:
    """Return what follows the parts of every entry: `_token_parts`, and the format if there is one."""
    parts: tuple[object, ...] = _token_parts(token_ids, logprobs) if logprobs else ()
    return (*(parts or _NO_TOKENS), format) if format else parts


def _end_parts(end: End) -> dict[str, object]:
    parts = changed_fields(end, skip="usage") | {"state": str(end.state)}
    return parts if end.usage is None else parts | {"usage": _usage_parts(end.usage)}


def _read_end(parts: Mapping[str, Any]) -> End:  # Any: not checked yet; each value is checked here
    usage = parts.get("usage")
    return End(
        state=JobState(parts["state"]),
        finish_reason=as_str_or_none(parts.get("finish_reason")),
        error=as_str_or_none(parts.get("error")),
        error_code=as_str_or_none(parts.get("error_code")),
        usage=None if usage is None else _read_usage(usage),
    )


def _usage_parts(usage: Usage) -> list[int]:
    return [usage.prompt_tokens, usage.output_tokens, usage.cached_tokens]


def _read_usage(parts: Sequence[object]) -> Usage:
    return Usage(prompt_tokens=as_int(parts[0]), output_tokens=as_int(parts[1]), cached_tokens=as_int(parts[2]))


def _logprobs_parts(logprobs: TokenLogprobs) -> list[float]:
    """Return `[chosen, id, log-probability, id, log-probability …]`; flat for size, because there is one per token."""
    return [logprobs.chosen, *(number for pair in logprobs.top for number in pair)]


def _token_parts(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> tuple[list[object], ...]:
    """Return `([differences of offsets], [id, bytes, id, bytes …])`, each id once; empty if all are unknown."""
    steps: list[int | None] = []
    tokens: dict[int, bytes | None] = {}
    last = 0
    for token_id, at in zip(token_ids, logprobs, strict=False):
        steps.append(None if at.offset is None else at.offset - last)
        last = last if at.offset is None else at.offset
        tokens[token_id] = at.token
        tokens.update(zip([other for other, _ in at.top], at.top_tokens, strict=False))
    pairs: list[object] = [part for pair in tokens.items() if pair[1] is not None for part in pair]
    return ([*steps], pairs) if pairs or any(step is not None for step in steps) else ()


def _read_logprobs(
    parts: object, token_ids: Sequence[int], tokens: Sequence[object]
) -> tuple[TokenLogprobs, ...] | None:
    if parts is False:
        return None
    logprobs = tuple(map(read_token_logprobs, as_list(parts)))
    if len(tokens) > 1 and tokens[:2] != [[], []]:
        logprobs = tuple(described(logprobs, token_ids, as_list(tokens[0]), as_list(tokens[1])))
    return logprobs


def described(
    logprobs: Iterable[TokenLogprobs], token_ids: Sequence[int], steps: list[object], pairs: list[object]
) -> Iterator[TokenLogprobs]:
    """Add tokens and offsets to log-probabilities, from the output of `_token_parts`."""
    tokens = dict(zip(map(as_int, pairs[::2]), map(as_bytes, pairs[1::2]), strict=True))
    last = 0
    for token_id, at, step in zip(token_ids, logprobs, steps, strict=True):
        last += 0 if step is None else as_int(step)
        top_tokens = tuple(tokens.get(other) for other, _ in at.top)
        yield TokenLogprobs(
            chosen=at.chosen,
            top=at.top,
            token=tokens.get(token_id),
            top_tokens=top_tokens if any(data is not None for data in top_tokens) else (),
            offset=None if step is None else last,
        )


def read_token_logprobs(parts: object) -> TokenLogprobs:
    """Decode the output of `_logprobs_parts`."""
    chosen, *rest = as_list(parts)
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return TokenLogprobs(chosen=as_float(chosen), top=tuple((as_int(token), as_float(value)) for token, value in pairs))


# ---------------------------------------------------------------- result and record


def encode_result(result: JobResult) -> bytes:
    """Pack the output of a job.

    Raises:
        WireError: the packed message is too large.
    """
    choices = list(map(_choice_parts, result.choices))
    data = packed([WIRE_VERSION, choices, _usage_parts(result.usage), result.model])
    return bounded(data, "result", limits.MAX_RESULT_BYTES)


def _choice_parts(choice: ChoiceResult) -> list[object]:
    parts = _text_parts(choice, choice.finish_reason)
    prompt, vector, output_format = choice.prompt, choice.vector, choice.format
    if prompt is None and vector is None and not output_format:
        return parts
    of_prompt = False if prompt is None else _text_parts(prompt, prompt.is_echoed)
    whole = [*parts, *_NO_TOKENS[len(parts) - 4 :], vector or False, of_prompt]
    return [*whole, output_format] if output_format else whole


def _text_parts(of: ChoiceResult | PromptResult, third: object) -> list[object]:
    """Return `[text, token ids, third, log-probabilities]`, and the tokens of these if they are known."""
    logprobs = of.logprobs
    packed_logprobs = False if logprobs is None else [_logprobs_parts(position) for position in logprobs]
    tokens = _token_parts(of.token_ids, logprobs) if logprobs else ()
    return [of.text, of.token_ids, third, packed_logprobs, *tokens]


def decode_result(data: bytes) -> JobResult:
    """Unpack the output of a job.

    Raises:
        WireError: the data has an unknown version, or is not a result.
    """
    message = open_message(data, "result", limits.MAX_RESULT_BYTES, at_least=4)
    with Reading("result"):
        _, choices, usage, model, *_ = message
        return JobResult(
            choices=tuple(map(_read_choice, choices)),
            usage=_read_usage(usage),
            model=as_str_or_none(model),
        )


def _read_choice(parts: Sequence[Any]) -> ChoiceResult:  # Any: not checked yet; each value is checked here
    text, token_ids, reason, logprobs, *rest = parts
    vector, prompt = rest[2:4] if len(rest) > 3 else (False, False)
    return ChoiceResult(
        text=as_str(text),
        token_ids=as_ints(token_ids),
        finish_reason=as_str_or_none(reason),
        logprobs=_read_logprobs(logprobs, token_ids, rest),
        vector=as_bytes(vector) if vector else None,
        prompt=_read_prompt_result(as_list(prompt)) if prompt else None,
        format=as_str(rest[4]) if len(rest) > 4 else "",
    )


def _read_prompt_result(parts: list[Any]) -> PromptResult:  # Any: as above
    text, token_ids, is_echoed, logprobs, *rest = parts
    return PromptResult(
        text=as_str(text),
        token_ids=as_ints(token_ids),
        is_echoed=bool(is_echoed),
        logprobs=_read_logprobs(logprobs, token_ids, rest),
    )


def encode_record(record: JobRecord) -> bytes:
    """Pack the measurements of a job, without those that were not taken."""
    values = changed_fields(record, skip="resolved")
    if record.resolved is not None:
        values["resolved"] = _resolved_parts(record.resolved)
    return packed([WIRE_VERSION, values])


def decode_record(data: bytes) -> JobRecord:
    """Unpack the measurements of a job; unknown names are ignored.

    Raises:
        WireError: the data has an unknown version, or is not a record.
    """
    values = open_message(data, "record", limits.MAX_SPEC_BYTES, at_least=2)[1]
    with Reading("record"):
        measurements = known_fields(JobRecord, values)
        # Any: each value is checked by the reader of its field.
        measured: dict[str, Any] = {name: _RECORD[name](value) for name, value in measurements.items()}
        return JobRecord(**measured)


# ---------------------------------------------------------------- outbox


def decode_events(data: bytes) -> list[OutboxEvent]:
    """Unpack one outbox entry: the events of one script call, packed by the script without a version.

    Raises:
        WireError: the data is not an array of events.
    """
    if len(data) > limits.MAX_EVENTS_BYTES:
        raise WireError(f"a list of events of {len(data)} bytes; at most {limits.MAX_EVENTS_BYTES} are read")
    with Reading("list of events"):
        # Any: each part is checked when it is read.
        events = cast("list[list[Any]]", as_list(unpack_from_script(data)))
        return [_read_event(*event[:5]) for event in events]


def _read_event(
    kind: bytes, job_id: bytes, version: int, at_ms: int, values: Mapping[bytes, Any]
) -> OutboxEvent:  # Any: as above
    return OutboxEvent(
        kind=_KINDS[kind],
        job_id=JobId(job_id.decode()),
        version=as_int(version),
        at_ms=as_int(at_ms),
        fields={name.decode(): value for name, value in values.items()},
    )


_KINDS: Mapping[bytes, EventKind] = {
    b"submitted": "submitted",
    b"started": "started",
    b"returned": "returned",
    b"ended": "ended",
}


# ---------------------------------------------------------------- reading


def _times(value: object) -> tuple[tuple[int, int | None], ...]:
    return tuple((as_int(at), None if wait is None else as_int(wait)) for at, wait in map(as_list, as_list(value)))


_TIMES = tuple[tuple[int, int | None], ...]
_READERS: Mapping[object, Callable[[object], object]] = {
    str | None: as_str,
    float | None: as_float,
    _TIMES: _times,
    ResolvedOptions | None: _read_resolved,
}
_RECORD = {field.name: _READERS.get(field.type, as_int) for field in fields(JobRecord)}
"""The reader of each measurement, by its type."""
