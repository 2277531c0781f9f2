"""Append tokens to channels and end jobs (`advance`, `put_result`), and detect whether channels are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sluice.protocol import limits
from sluice.protocol.calls.base import Call, Raw
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import pack_for_script
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCall:
    """The end of one choice, in the same call as its last tokens."""

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
    releases, and its `End`. A requeue removes this entry alone."""

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

    Raises:
        ValueError: there are too many choices for one call.
    """
    if len(progress) > limits.MAX_JOBS_PER_CALL:
        raise ValueError(f"{len(progress)} in one call; at most {limits.MAX_JOBS_PER_CALL}")
    rows = [_progress_row(item) for item in progress]
    return Call("advance", keys.fixed(), (incarnation, pack_for_script(rows)), _read_advance)


def _progress_row(progress: Progress) -> tuple[object, ...]:
    """Build a row in the order of `advance` in advance.lua. Trailing fields that most steps lack are left out."""
    # By position: job to entry, the six extras, the end.
    row, extras = progress[:6], progress[6:12]
    has_extras = extras != _NO_EXTRAS
    if progress.end is None:
        return (*row, extras) if has_extras else row
    return (*row, extras if has_extras else None, _end_row(progress.end))


_NO_EXTRAS = (None, None, None, None, None, None)


def _end_row(end: EndCall) -> tuple[object, ...]:
    """Build the end in the order of `how_of` in lib_advance.lua."""
    return (
        str(end.state),
        end.reason,
        end.error,
        end.error_code,
        end.result,
        end.record,
        end.output_tokens,
        end.retry_in_ms,
        end.entry,
        end.result_bytes,
        1 if end.is_rejected else None,
    )


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
