"""Append tokens to channels and end jobs (`advance`, `put_result`), and detect whether channels are read."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sluice.protocol import limits
from sluice.protocol.calls.base import Call, Raw
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId


class EndCall(NamedTuple):
    """The end of one choice, in the same call as its last tokens. A named tuple: one is made per job."""

    state: JobState
    reason: str | None
    """Finish reason when done."""

    error: str | None
    error_code: str | None
    result: bytes | None
    """Encoded JobResult of all choices, with the last end of the job. None if it was written in parts."""

    record: bytes
    """Encoded JobRecord."""

    output_tokens: int
    """Output tokens of all choices, to correct the tenant's virtual tokens."""

    entry: bytes
    """Encoded ChannelEntry of the end: no tokens, `start` is the offset after the last one, the text that only the end
    releases, and its `End`. A requeue removes this entry alone. Empty for a job of one choice that is done and whose
    channel has nothing: it then has none, and the tokens of this call are only counted."""

    retry_in_ms: int | None = None
    """For a retryable failure: requeue the job after this time, unless it has failed too often."""

    result_bytes: int | None = None
    """Length of a result that was written in parts (`put_result`), with `result` None."""

    is_rejected: bool = False
    """Whether the job is invalid: it ends without entering the dead set."""


class Progress(NamedTuple):
    """Output that steps added to one choice since its last advance. A named tuple: one is made per choice and round."""

    job_id: JobId
    epoch: int
    choice: int
    start: int
    num_tokens: int
    entry: bytes
    """Encoded ChannelEntry of the tokens; empty if there are none."""

    first_scheduled_ms: int | None = None
    """Set in the first advance after it is known; likewise the next five."""

    first_token_ms: int | None = None
    prompt_tokens: int | None = None
    fingerprint: str | None = None
    gap_ms: int | None = None
    """Longest gap between tokens in this attempt so far; set again after a longer one."""

    resolved: bytes | None = None
    """Encoded ResolvedOptions of this attempt. The queue keeps those of the attempt that publishes first."""

    end: EndCall | None = None

    @property
    def has_more_than_tokens(self) -> bool:
        """Whether it changes the job's row, which costs several times as much as tokens alone."""
        return self[6:] != _ONLY_TOKENS


_NO_EXTRAS = (None, None, None, None, None, None)
_ONLY_TOKENS = (*_NO_EXTRAS, None)


@dataclass(frozen=True, slots=True)
class Ok:
    """Appended."""

    stop: JobState | None = None
    """Set if the job is flagged: end it with this state."""


@dataclass(frozen=True, slots=True)
class Already:
    """The channel already had all of this output."""

    stop: JobState | None = None


@dataclass(frozen=True, slots=True)
class SendFrom:
    """The channel is at `offset`; send again from there."""

    offset: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """Another worker owns the job; drop the sequence."""


@dataclass(frozen=True, slots=True)
class Retried:
    """The job was requeued, as its end requested; it has no owner until its delay has passed."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A key of the job has the wrong type, for this reason. Its lease is gone: drop the sequence."""

    reason: str


AdvanceAnswer = Ok | Already | SendFrom | Replaced | Retried | Broken


def advance(keys: QueueKeys, incarnation: str, progress: Sequence[Progress]) -> Call[list[AdvanceAnswer]]:
    """Append tokens and ends to channels, fenced by (incarnation, epoch); returns one answer per choice.

    At most `MAX_UPDATES_PER_CALL` choices, of which `MAX_JOBS_PER_CALL` may have more than tokens.

    Raises:
        ValueError: there are too many choices for one call.
    """
    num_with_more = sum(item.has_more_than_tokens for item in progress)
    if len(progress) > limits.MAX_UPDATES_PER_CALL or num_with_more > limits.MAX_JOBS_PER_CALL:
        most = f"{limits.MAX_UPDATES_PER_CALL}, and {limits.MAX_JOBS_PER_CALL} with more than tokens"
        raise ValueError(f"{len(progress)} in one call, {num_with_more} with more than tokens; at most {most}")
    return Call("advance", keys.fixed(), (incarnation, _packed(progress)), _read_advance)


_NUMBERS = struct.Struct("<IBIII")


def _packed(progress: Iterable[Progress]) -> bytes:
    """Pack progress; advance.lua has the formats.

    Raises:
        ValueError: a name is longer than 255 bytes.
    """
    pieces: list[bytes] = []
    for item in progress:
        # By position: job to entry, the six extras, the end.
        job_id, epoch, choice, start, num_tokens, entry = item[:6]
        extras, end, name = item[6:12], item.end, job_id.encode()
        has_extras = extras != _NO_EXTRAS
        pieces += (
            bytes((has_extras + (2 if end else 0), len(name))),
            name,
            _NUMBERS.pack(epoch, choice, start, num_tokens, len(entry)),
            entry,
        )
        if has_extras:
            pieces.append(_packed_extras(*extras))
        if end is not None:
            pieces += _pieces_of_end(end)
    return b"".join(pieces)


def _packed_extras(
    first_scheduled_ms: int | None,
    first_token_ms: int | None,
    prompt_tokens: int | None,
    fingerprint: str | None,
    gap_ms: int | None,
    resolved: bytes | None,
) -> bytes:
    times = _six(first_scheduled_ms or 0) + _six(first_token_ms or 0)
    return times + _optional(prompt_tokens) + _optional(gap_ms) + _short(fingerprint) + _long(resolved)


def _pieces_of_end(end: EndCall) -> tuple[bytes, ...]:
    return (
        end.state[0].encode(),
        b"\1" if end.is_rejected else b"\0",
        _short(end.reason),
        _long((end.error or "").encode()),
        _short(end.error_code),
        _long(end.result),
        _long(end.record),
        _six(end.output_tokens),
        _optional(end.retry_in_ms),
        _optional(end.result_bytes),
        _long(end.entry),
    )


def _six(number: int) -> bytes:
    return number.to_bytes(6, "little")


def _optional(number: int | None) -> bytes:
    return _NONE if number is None else _six(number + 1)


def _short(text: str | None) -> bytes:
    if text is None:
        return _EMPTY_SHORT
    data = text.encode()
    return bytes((len(data),)) + data


def _long(data: bytes | None) -> bytes:
    return len(data).to_bytes(4, "little") + data if data else _EMPTY_LONG


_NONE, _EMPTY_SHORT, _EMPTY_LONG = bytes(6), bytes(1), bytes(4)


def _read_advance(reply: Raw) -> list[AdvanceAnswer]:
    return [_OK if word == b"ok" else _read_answer(word.decode(errors="replace")) for word in reply]


_OK = Ok()


def _read_answer(word: str) -> AdvanceAnswer:
    kind, _, rest = word.partition(" ")
    match kind:
        case "ok":
            return Ok(JobState(rest))
        case "already":
            return Already(JobState(rest) if rest else None)
        case "at":
            return SendFrom(int(rest))
        case "replaced":
            return Replaced()
        case "retried":
            return Retried()
        case _:
            return Broken(rest)


def put_result(keys: QueueKeys, incarnation: str, job_id: JobId, epoch: int, *, offset: int, part: bytes) -> Call[str]:
    """Write one part of a large result, in order from offset 0; returns `ok`, `replaced`, `too_large` or `missing`.

    A part is written only after the previous one, so that a part that the server refused leaves no gap.

    The end then has the total length (`EndCall.result_bytes`). If parts are missing, the answer to the end is
    `SendFrom` with its own offset: write the parts again first.
    """
    return Call("put_result", keys.fixed(), (incarnation, job_id, epoch, offset, part), lambda reply: reply.decode())


def count_reads(keys: QueueKeys) -> Call[int | None]:
    """Read how many XREADs the partition's server has answered, to all clients; None if it does not report it."""
    return Call("count_reads", keys.fixed(), (), lambda reply: reply)
