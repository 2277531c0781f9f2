"""Submit jobs: `NewJob` in, one answer per job out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from sluice.protocol import limits
from sluice.protocol.calls.base import Call, FromNow, Raw
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import pack_for_script
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """The line of a bulk file that became a job. Kept with the job, so that its row can be joined to the file."""

    custom_id: str
    """The custom id in the line; `line-<number>` for a line without one."""

    number: int
    """Number of the line, from 1."""

    endpoint: str
    """The endpoint whose response format the result takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """An encoded job."""

    id: JobId
    spec: bytes
    payload: bytes
    seed: int
    priority: int = 0
    prompt_tokens: int | None = None
    """Exact for token ids. None: the script estimates it from `prompt_bytes` and the bytes per token of the queue."""

    prompt_bytes: int
    max_tokens: int
    is_length_stated: bool = True
    """False: the request does not state `max_tokens`. The number is an estimate; a worker generates what fits."""

    choices: int = 1
    idempotency_key: str | None = None
    digest: bytes
    """Digest of prompt and options: the same key or id with another digest is a conflict."""

    batch: str | None = None
    not_before_ms: int | FromNow | None = None
    """Wall-clock time before which the job does not start, or a time from now."""

    ttl_ms: int | None = None
    """Longest wait in the queue, from submit."""

    deadline_ms: int | FromNow | None = None
    """Wall-clock time by which the job must have ended, or a time from now."""

    wants_callback: bool = False
    features: tuple[str, ...] = ()
    """Features that a worker needs for the job, by the names in `QueueSettings.features`."""

    source: SourceLine | None = None
    """The line of a bulk file, if the job is one. Neither the job's id nor its digest depends on it."""

    submitted_ms: int | None = None
    """Original submit time of a job that the queue has lost, so that it remains the same submission; None: now."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The job is on its lane."""

    id: JobId
    ahead_jobs: int
    ahead_tokens: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The job was submitted before; `id` is that of the first submit."""

    id: JobId
    state: JobState


@dataclass(frozen=True, slots=True)
class Conflict:
    """The id or idempotency key belongs to another job."""

    id: JobId


FullReason: TypeAlias = Literal["full_jobs", "full_tokens", "full_bytes", "tenant_full", "full_memory", "outbox_full"]
RefusalReason: TypeAlias = FullReason | Literal["too_large", "feature", "wrong_type", "batch_closed"]

FULL: tuple[FullReason, ...] = get_args(FullReason)
"""Reasons of refusals for lack of room."""

PASSING: tuple[RefusalReason, ...] = (*FULL, "wrong_type")
"""Reasons of refusals that may pass: the same jobs may be accepted later. A key of a foreign type may be removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The queue does not accept the job; nothing was written."""

    reason: RefusalReason
    waiting_jobs: int
    waiting_tokens: int
    waiting_bytes: int
    bound: int
    message: str


SubmitReply = Accepted | Duplicate | Conflict | Refused


def submit(keys: QueueKeys, jobs: Sequence[NewJob], *, is_to_end: bool = False) -> Call[list[SubmitReply]]:
    """Put up to `MAX_JOBS_PER_CALL` jobs on their lanes; returns one answer per job.

    After the first job over a limit, all further new jobs are refused, which keeps their order. Keep a call below
    `MAX_CALL_BYTES`, so that it does not block the server for long; send a larger job alone.

    Args:
        keys: The partition.
        jobs: The jobs.
        is_to_end: Whether the jobs are cancelled at once: they may exceed the bounds of waiting jobs.

    Raises:
        ValueError: too many jobs, or one of another partition, or with an invalid priority.
    """
    if len(jobs) > limits.MAX_JOBS_PER_CALL:
        raise ValueError(f"{len(jobs)} jobs in one call; at most {limits.MAX_JOBS_PER_CALL}")
    rows = [_job_row(keys, job) for job in jobs]
    return Call("submit", keys.fixed(), (pack_for_script(rows), *(["1"] if is_to_end else ())), _read_submit)


def _job_row(keys: QueueKeys, job: NewJob) -> tuple[object, ...]:
    """Build a row in the order of `unpacked` in submit.lua."""
    if split_job_id(job.id)[0] != keys.partition:
        raise ValueError(f"job {job.id} belongs to another partition than {keys.partition}")
    if not 0 <= job.priority <= limits.MAX_PRIORITY:
        raise ValueError(f"priority must be in [0, {limits.MAX_PRIORITY}], got {job.priority}")
    source = job.source
    return (
        job.id,
        job.spec,
        job.payload,
        str(job.seed),
        job.priority,
        job.prompt_tokens,
        job.prompt_bytes,
        job.max_tokens,
        job.choices,
        job.idempotency_key,
        job.digest,
        job.batch,
        _wall_ms(job.not_before_ms),
        job.ttl_ms,
        _wall_ms(job.deadline_ms),
        1 if job.wants_callback else None,
        job.features or None,
        *((source.custom_id, source.number, source.endpoint) if source else (None, None, None)),
        _left_ms(job.not_before_ms),
        _left_ms(job.deadline_ms),
        job.submitted_ms,
        None if job.is_length_stated else 1,
    )


def _wall_ms(moment: int | FromNow | None) -> int | None:
    return None if isinstance(moment, FromNow) else moment


def _left_ms(moment: int | FromNow | None) -> int | None:
    return moment.left_ms() if isinstance(moment, FromNow) else None


def _read_submit(reply: Raw) -> list[SubmitReply]:
    return [_SUBMIT_REPLIES[row[0]](row) for row in reply]


def _read_refused(row: Raw) -> Refused:
    _, reason, jobs, tokens, num_bytes, bound, message = row
    return Refused(
        reason=reason.decode(),
        waiting_jobs=jobs,
        waiting_tokens=tokens,
        waiting_bytes=num_bytes,
        bound=bound,
        message=message.decode(errors="replace"),
    )


_SUBMIT_REPLIES: Mapping[bytes, Callable[[Raw], SubmitReply]] = {
    b"accepted": lambda row: Accepted(JobId(row[1].decode()), row[2], row[3]),
    b"duplicate": lambda row: Duplicate(JobId(row[1].decode()), JobState(row[2].decode())),
    b"conflict": lambda row: Conflict(JobId(row[1].decode(errors="replace"))),
    b"refused": _read_refused,
}
