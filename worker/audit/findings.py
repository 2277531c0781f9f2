"""Disagreements between the sources about one job, lane or counter. Plain values; no I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from sluice.protocol import limits
from sluice.protocol.calls.audit import JobRecords
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId

REPAIR = "`worker audit --repair`"


class Kind(StrEnum):
    """Kinds of disagreements, each with what to do about it."""

    advice: str

    def __new__(cls, value: str, advice: str) -> Self:
        """Make a kind whose value is a constant word for programs."""
        kind = str.__new__(cls, value)
        kind._value_, kind.advice = value, advice
        return kind

    QUEUED_NOWHERE = "queued_nowhere", f"{REPAIR} puts it back on its lane"
    QUEUED_TWICE = "queued_twice", f"{REPAIR} removes all of its entries but one"
    QUEUED_BUT_LEASED = "queued_but_leased", f"{REPAIR} releases the lease"
    NEVER_DUE = "never_due", f"{REPAIR} puts it on its lane"
    PROMPT_GONE = (
        "prompt_gone",
        f"{REPAIR} restores it from a history with prompts or --file; else it fails when pulled",
    )
    RUNNING_WITHOUT_OWNER = "running_for_nobody", f"{REPAIR} returns it to the queue; it resumes at its next token"
    LEASED_TWICE = "leased_twice", f"{REPAIR} deletes the leases of other workers than its owner"
    RUNNING_BUT_WAITING = "running_but_waiting", f"{REPAIR} removes it from the waiting jobs"
    ENDED_BUT_LEASED = "ended_but_leased", f"{REPAIR} deletes the lease"
    ENDED_BUT_WAITING = "ended_but_waiting", f"{REPAIR} removes it from the waiting jobs"
    DEAD_BUT_NOT_FAILED = "dead_but_not_failed", f"{REPAIR} removes it from the dead set"
    NO_SUCH_JOB = (
        "no_such_job",
        f"{REPAIR} deletes references to it, and submits it again if the history or journal has it",
    )
    BATCH_MEMBER = "batch_member", f"{REPAIR} corrects the batch's list of open jobs"
    CHANNEL_OPEN = "channel_open", f"{REPAIR} writes its end to the channel for its readers"
    FOREIGN_KEY = "foreign_key", "another program wrote this key: check it, delete it, then run the audit again"
    ENTRY_WITHOUT_JOB = "entry_without_job", f"{REPAIR} removes the entry from the lane"
    LANE_UNLISTED = "lane_unlisted", f"pulls cannot find its jobs: {REPAIR} lists it again"
    BATCH = "batch", f"{REPAIR} counts its jobs"
    COUNTER = "counter", f"{REPAIR} recounts"
    EQUATION = "equation", f"{REPAIR} recounts"
    NOT_IN_HISTORY = "not_in_history", f"{REPAIR} republishes its events"
    HISTORY_DIFFERS = "history_differs", f"{REPAIR} republishes its events"
    QUEUE_WENT_BACK = (
        "queue_went_back",
        f"Redis lost its latest writes: {REPAIR} republishes the events of open jobs. A job that had "
        "ended in the history runs again, with the same seed, unless you cancel it",
    )
    FORGOTTEN = "forgotten", f"{REPAIR} submits it again, from a history with prompts or from --file"
    REPLACED = (
        "replaced",
        "the history lacks the end of a submission whose id was used again, and the queue has forgotten it: "
        "nothing can be repaired",
    )
    UNKNOWN_TO_ALL = "unknown_to_all", f"{REPAIR} --file FILE submits it again"
    LOST_OR_DELETED = (
        "lost_or_deleted",
        "retention may have deleted its row after it ended, so it is not repaired: if its output is "
        "missing, submit the line again",
    )
    HISTORY_BEHIND = (
        "history_behind",
        "rows could not be compared: start `worker record`, check its log, then run the audit again",
    )
    SETTINGS_LOST = (
        "settings_lost",
        "Redis lost the queue's settings, and no worker remembered them: set them again with "
        "`producer queues set`, or start a worker with --keep-prompts and --keep-results",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One disagreement: the state of one job, lane or counter in each source."""

    kind: Kind
    subject: str
    """Job id, lane entry or counter."""

    queue: str | None = None
    history: str | None = None
    journal: str | None = None
    partition: int = 0
    job_id: JobId | None = None
    lane: str | None = None
    entry: str | None = None
    version: int = 0
    """Version that the other source must have reached at the second pass."""

    drift: int = 0
    """Excess of a counter over what it counts. A real error stays the same while jobs come and go."""

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the finding in both passes."""
        return self.kind, self.subject


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """The history's row of one submission of a job."""

    state: JobState
    version: int
    submitted_ms: int = 0
    is_deleted: bool = False
    """Deleted on request; the history ignores further events of it."""

    def __str__(self) -> str:
        return f"{self.state} (version {self.version})"

    @property
    def is_open(self) -> bool:
        """Whether the history expects an end."""
        return not (self.is_deleted or self.state.is_terminal)


def row_of(records: JobRecords, rows: Sequence[HistoryRow]) -> HistoryRow | None:
    """Return the row of the submission that the queue has; if it has none, an open row, or else the newest.

    Args:
        records: The job in the queue.
        rows: All rows of its id, the newest first.
    """
    if records.state is not None:
        return next((row for row in rows if row.submitted_ms == records.submitted_ms), None)
    return next((row for row in rows if row.is_open), rows[0] if rows else None)


def describe(records: JobRecords) -> str:
    """Describe a job's state in the queue."""
    if records.state is None:
        return "unknown" if records.problem == "unknown" else f"key is foreign ({records.problem})"
    return f"{records.state} (version {records.version})"


# ---------------------------------------------------------------- within the queue


def within_queue(records: JobRecords) -> Iterator[Finding]:
    """Yield disagreements among a job's keys and the structures that refer to it."""
    for kind, detail in _within(records):
        queue = f"{describe(records)}, {detail}"
        yield Finding(kind=kind, subject=records.id, job_id=records.id, queue=queue, partition=_partition(records.id))


def _within(records: JobRecords) -> Iterator[tuple[Kind, str]]:
    match records.state:
        case None:
            yield from _of_no_job(records)
        case JobState.QUEUED:
            yield from _of_queued(records)
        case JobState.RUNNING:
            yield from _of_running(records)
        case _:
            yield from _of_ended(records)


def _of_no_job(records: JobRecords) -> Iterator[tuple[Kind, str]]:
    if records.problem != "unknown":
        yield Kind.FOREIGN_KEY, f"its row is {records.problem}"
        return
    is_dead = records.dead_ms is not None and records.seen_ms - records.dead_ms < limits.DEAD_TTL_S * 1000
    references = {
        "has a lease": bool(records.strays),
        "is among the suspects": records.is_suspect,
        "is among the delayed": records.is_delayed,
        "is in the dead set": is_dead,
    }
    if any(references.values()):
        yield Kind.NO_SUCH_JOB, "but " + " and ".join(what for what, is_so in references.items() if is_so)


def _of_queued(records: JobRecords) -> Iterator[tuple[Kind, str]]:
    if records.num_places == 0:
        lost = f"its entry {records.entry} is not on lane {records.lane}" if records.entry else "no entry is named"
        yield Kind.QUEUED_NOWHERE, f"{lost}; neither delayed nor a suspect"
    if records.num_places > 1:
        yield Kind.QUEUED_TWICE, _places(records)
    if records.strays:
        yield Kind.QUEUED_BUT_LEASED, _leases(records)
    if records.is_delayed and not records.has_timer:
        yield Kind.NEVER_DUE, "delayed, without a timer"
    if not records.has_payload:
        yield Kind.PROMPT_GONE, "no payload"
    yield from _of_open(records)


def _of_running(records: JobRecords) -> Iterator[tuple[Kind, str]]:
    if not records.is_held:
        yield Kind.RUNNING_WITHOUT_OWNER, f"its owner {records.owner} does not hold it"
    elif not records.is_owner_listed:
        yield Kind.RUNNING_WITHOUT_OWNER, f"its owner {records.owner} is not known"
    elif records.lease_epoch != records.epoch:
        yield Kind.RUNNING_WITHOUT_OWNER, f"its lease has epoch {records.lease_epoch}, the job {records.epoch}"
    if records.strays:
        yield Kind.LEASED_TWICE, _leases(records)
    if records.is_delayed or records.is_suspect:
        yield Kind.RUNNING_BUT_WAITING, _places(records)
    if not records.has_payload:
        yield Kind.PROMPT_GONE, "no payload: another worker could not resume it"
    yield from _of_open(records)


def _of_open(records: JobRecords) -> Iterator[tuple[Kind, str]]:
    if records.is_in_batch is False:
        yield Kind.BATCH_MEMBER, "its batch does not list it as open"


def _of_ended(records: JobRecords) -> Iterator[tuple[Kind, str]]:
    if records.strays:
        yield Kind.ENDED_BUT_LEASED, _leases(records)
    if records.is_delayed or records.is_suspect:
        yield Kind.ENDED_BUT_WAITING, _places(records)
    if records.dead_ms is not None and records.state is not JobState.FAILED:
        yield Kind.DEAD_BUT_NOT_FAILED, "in the dead set"
    if records.is_in_batch:
        yield Kind.BATCH_MEMBER, "its batch lists it as open"
    if records.has_open_channel:
        yield Kind.CHANNEL_OPEN, "a channel has tokens and no end"


def _leases(records: JobRecords) -> str:
    return "lease of " + " and ".join(records.strays)


def _places(records: JobRecords) -> str:
    places = {
        f"on lane {records.lane}": records.has_entry,
        "delayed": records.is_delayed,
        "a suspect": records.is_suspect,
    }
    return " and ".join(place for place, is_there in places.items() if is_there)


def _partition(job_id: JobId) -> int:
    return int(job_id.partition(".")[0])


# ---------------------------------------------------------------- between the queue and the history


def with_history(records: JobRecords, row: HistoryRow | None) -> Finding | None:
    """Return the disagreement of queue and history about a job. The second pass rules out events in transit."""
    if row is not None and row.is_deleted:
        return None
    if records.state is None:
        return _unknown_to_queue(records, row) if records.problem == "unknown" else None
    if row is None or row.version < records.version:
        kind = Kind.NOT_IN_HISTORY if row is None else Kind.HISTORY_DIFFERS
        return _between(kind, records, row, version=records.version)
    if row.version > records.version:
        return _between(Kind.QUEUE_WENT_BACK, records, row, version=row.version)
    if row.state != records.state:
        return _between(Kind.HISTORY_DIFFERS, records, row, version=records.version)
    return None


def with_other_submissions(records: JobRecords, rows: Sequence[HistoryRow]) -> Finding | None:
    """Return a finding if a submission that the queue has replaced by another one of the same id is open."""
    if records.state is None:
        return None
    for row in rows:
        if row.is_open and row.submitted_ms != records.submitted_ms:
            return _between(Kind.REPLACED, records, row, version=0)
    return None


def _unknown_to_queue(records: JobRecords, row: HistoryRow | None) -> Finding | None:
    """Return a finding unless the job has ended, because ended jobs expire from the queue."""
    if row is None or row.state.is_terminal:
        return None
    return _between(Kind.FORGOTTEN, records, row, version=0)


def _between(kind: Kind, records: JobRecords, row: HistoryRow | None, *, version: int) -> Finding:
    return Finding(
        kind=kind,
        subject=records.id,
        job_id=records.id,
        partition=_partition(records.id),
        queue=describe(records),
        history="no row" if row is None else str(row),
        version=version,
    )


def with_journal(records: JobRecords, row: HistoryRow | None, *, has_retention: bool) -> Finding | None:
    """Return a finding for an acknowledged job without hash and row.

    With retention, the job may have ended long ago and lost its row: a journal has no times.
    """
    if records.problem != "unknown" or row is not None:
        return None
    return Finding(
        kind=Kind.LOST_OR_DELETED if has_retention else Kind.UNKNOWN_TO_ALL,
        subject=records.id,
        job_id=records.id,
        partition=_partition(records.id),
        queue="unknown",
        history="no row",
        journal="acknowledged",
    )


def is_confirmed(first: Finding, second: Finding, records: JobRecords | None, row: HistoryRow | None) -> bool:
    """Return whether the second pass confirms a finding, which rules out events in transit.

    Between the passes, everything that the first pass saw in the queue was recorded, unless there is a
    `HISTORY_BEHIND`. So the history must have reached the version seen then, and the queue never falls behind it.
    """
    match first.kind:
        case Kind.NOT_IN_HISTORY:
            return row is None
        case Kind.HISTORY_DIFFERS:
            return row is not None and (row.version < first.version or row.version == _version(records))
        case Kind.QUEUE_WENT_BACK:
            return _version(records) < first.version
        case Kind.BATCH | Kind.COUNTER | Kind.EQUATION:
            return first.drift == second.drift
        case _:
            return True


def _version(records: JobRecords | None) -> int:
    return 0 if records is None else records.version
