"""Disagreements between the sources about one job, lane or counter. Plain values; no I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice.protocol import limits
from sluice.protocol.calls.audit import JobRecords
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId


class Kind(StrEnum):
    """Kinds of disagreements."""

    QUEUED_NOWHERE = "queued_nowhere"
    QUEUED_TWICE = "queued_twice"
    QUEUED_BUT_LEASED = "queued_but_leased"
    NEVER_DUE = "never_due"
    PROMPT_GONE = "prompt_gone"
    RUNNING_WITHOUT_OWNER = "running_for_nobody"
    RUNNING_BUT_WAITING = "running_but_waiting"
    ENDED_BUT_LEASED = "ended_but_leased"
    ENDED_BUT_WAITING = "ended_but_waiting"
    DEAD_BUT_NOT_FAILED = "dead_but_not_failed"
    NO_SUCH_JOB = "no_such_job"
    BATCH_MEMBER = "batch_member"
    CHANNEL_OPEN = "channel_open"
    FOREIGN_KEY = "foreign_key"
    ENTRY_WITHOUT_JOB = "entry_without_job"
    LANE_UNLISTED = "lane_unlisted"
    BATCH = "batch"
    COUNTER = "counter"
    EQUATION = "equation"
    NOT_IN_HISTORY = "not_in_history"
    HISTORY_DIFFERS = "history_differs"
    QUEUE_WENT_BACK = "queue_went_back"
    FORGOTTEN = "forgotten"
    REPLACED = "replaced"
    UNKNOWN_TO_ALL = "unknown_to_all"
    LOST_OR_DELETED = "lost_or_deleted"
    HISTORY_BEHIND = "history_behind"
    SETTINGS_LOST = "settings_lost"


REPAIR = "`worker audit --repair`"
WHAT_TO_DO: dict[Kind, str] = {
    Kind.QUEUED_NOWHERE: f"{REPAIR} puts it back on its lane",
    Kind.QUEUED_TWICE: f"{REPAIR} removes all of its entries but one",
    Kind.QUEUED_BUT_LEASED: f"{REPAIR} releases the lease",
    Kind.NEVER_DUE: f"{REPAIR} puts it on its lane",
    Kind.PROMPT_GONE: f"{REPAIR} restores it from a history with prompts or --file; else it fails when pulled",
    Kind.RUNNING_WITHOUT_OWNER: f"{REPAIR} returns it to the queue; it resumes at its next token",
    Kind.RUNNING_BUT_WAITING: f"{REPAIR} removes it from the waiting jobs",
    Kind.ENDED_BUT_LEASED: f"{REPAIR} deletes the lease",
    Kind.ENDED_BUT_WAITING: f"{REPAIR} removes it from the waiting jobs",
    Kind.DEAD_BUT_NOT_FAILED: f"{REPAIR} removes it from the dead set",
    Kind.NO_SUCH_JOB: f"{REPAIR} deletes references to it, and submits it again if the history or journal has it",
    Kind.BATCH_MEMBER: f"{REPAIR} corrects the batch's list of open jobs",
    Kind.CHANNEL_OPEN: f"{REPAIR} writes its end to the channel for its readers",
    Kind.BATCH: f"{REPAIR} counts its jobs",
    Kind.FOREIGN_KEY: "another program wrote this key: check it, delete it, then run the audit again",
    Kind.ENTRY_WITHOUT_JOB: f"{REPAIR} removes the entry from the lane",
    Kind.LANE_UNLISTED: f"pulls cannot find its jobs: {REPAIR} lists it again",
    Kind.COUNTER: f"{REPAIR} recounts",
    Kind.EQUATION: f"{REPAIR} recounts",
    Kind.NOT_IN_HISTORY: f"{REPAIR} republishes its events",
    Kind.HISTORY_DIFFERS: f"{REPAIR} republishes its events",
    Kind.QUEUE_WENT_BACK: f"Redis lost its latest writes: {REPAIR} republishes the events of open jobs. A job that had "
    "ended in the history runs again, with the same seed, unless you cancel it",
    Kind.FORGOTTEN: f"{REPAIR} submits it again, from a history with prompts or from --file",
    Kind.REPLACED: "the history lacks the end of a submission whose id was used again, and the queue has forgotten it: "
    "nothing can be repaired",
    Kind.UNKNOWN_TO_ALL: f"{REPAIR} --file FILE submits it again",
    Kind.LOST_OR_DELETED: "retention may have deleted its row after it ended, so it is not repaired: if its output is "
    "missing, submit the line again",
    Kind.SETTINGS_LOST: "Redis lost the queue's settings, and no worker remembered them: set them again with "
    "`producer queues set`, or start a worker with --keep-prompts and --keep-results",
    Kind.HISTORY_BEHIND: "rows could not be compared: start `worker record`, check its log, then run the audit again",
}


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


def row_of(picture: JobRecords, rows: Sequence[HistoryRow]) -> HistoryRow | None:
    """Return the row of the submission that the queue has; if it has none, an open row, or else the newest.

    Args:
        picture: The job in the queue.
        rows: All rows of its id, the newest first.
    """
    if picture.state is not None:
        return next((row for row in rows if row.submitted_ms == picture.submitted_ms), None)
    return next((row for row in rows if row.is_open), rows[0] if rows else None)


def describe(picture: JobRecords) -> str:
    """Describe a job's state in the queue."""
    if picture.state is None:
        return "unknown" if picture.trouble == "unknown" else f"key is foreign ({picture.trouble})"
    return f"{picture.state} (version {picture.version})"


# ---------------------------------------------------------------- within the queue


def within_queue(picture: JobRecords) -> Iterator[Finding]:
    """Yield disagreements among a job's keys and the structures that refer to it."""
    for kind, detail in _within(picture):
        queue = f"{describe(picture)}, {detail}"
        yield Finding(kind=kind, subject=picture.id, job_id=picture.id, queue=queue, partition=_partition(picture.id))


def _within(picture: JobRecords) -> Iterator[tuple[Kind, str]]:
    match picture.state:
        case None:
            yield from _of_no_job(picture)
        case JobState.QUEUED:
            yield from _of_queued(picture)
        case JobState.RUNNING:
            yield from _of_running(picture)
        case _:
            yield from _of_ended(picture)


def _of_no_job(picture: JobRecords) -> Iterator[tuple[Kind, str]]:
    if picture.trouble != "unknown":
        yield Kind.FOREIGN_KEY, f"its hash is {picture.trouble}"
        return
    is_dead = picture.dead_ms is not None and picture.seen_ms - picture.dead_ms < limits.DEAD_TTL_S * 1000
    references = {
        "has a lease": picture.owner is not None,
        "is among the suspects": picture.is_suspect,
        "is among the delayed": picture.is_delayed,
        "is in the dead set": is_dead,
    }
    if any(references.values()):
        yield Kind.NO_SUCH_JOB, "but " + " and ".join(what for what, is_so in references.items() if is_so)


def _of_queued(picture: JobRecords) -> Iterator[tuple[Kind, str]]:
    if picture.num_places == 0:
        lost = f"its entry {picture.entry} is not on lane {picture.lane}" if picture.entry else "no entry is named"
        yield Kind.QUEUED_NOWHERE, f"{lost}; neither delayed nor a suspect"
    if picture.num_places > 1:
        yield Kind.QUEUED_TWICE, _places(picture)
    if picture.owner:
        yield Kind.QUEUED_BUT_LEASED, f"lease of {picture.owner}"
    if picture.is_delayed and not picture.has_timer:
        yield Kind.NEVER_DUE, "delayed, without a timer"
    if not picture.has_payload:
        yield Kind.PROMPT_GONE, "no payload"
    yield from _of_open(picture)


def _of_running(picture: JobRecords) -> Iterator[tuple[Kind, str]]:
    if not picture.owner:
        yield Kind.RUNNING_WITHOUT_OWNER, "no lease" if picture.owner is None else "its lease was given back"
    elif not picture.is_held:
        yield Kind.RUNNING_WITHOUT_OWNER, f"its owner {picture.owner} does not hold it"
    elif not picture.is_owner_listed:
        yield Kind.RUNNING_WITHOUT_OWNER, f"its owner {picture.owner} is not known"
    elif picture.lease_epoch != picture.epoch:
        yield Kind.RUNNING_WITHOUT_OWNER, f"its lease has epoch {picture.lease_epoch}, the job {picture.epoch}"
    if picture.is_delayed or picture.is_suspect:
        yield Kind.RUNNING_BUT_WAITING, _places(picture)
    if not picture.has_payload:
        yield Kind.PROMPT_GONE, "no payload: another worker could not resume it"
    yield from _of_open(picture)


def _of_open(picture: JobRecords) -> Iterator[tuple[Kind, str]]:
    if picture.is_in_batch is False:
        yield Kind.BATCH_MEMBER, "its batch does not list it as open"


def _of_ended(picture: JobRecords) -> Iterator[tuple[Kind, str]]:
    if picture.owner is not None:
        yield Kind.ENDED_BUT_LEASED, f"lease of {picture.owner or 'no worker'}"
    if picture.is_delayed or picture.is_suspect:
        yield Kind.ENDED_BUT_WAITING, _places(picture)
    if picture.dead_ms is not None and picture.state is not JobState.FAILED:
        yield Kind.DEAD_BUT_NOT_FAILED, "in the dead set"
    if picture.is_in_batch:
        yield Kind.BATCH_MEMBER, "its batch lists it as open"
    if picture.has_open_channel:
        yield Kind.CHANNEL_OPEN, "a channel has tokens and no end"


def _places(picture: JobRecords) -> str:
    places = {
        f"on lane {picture.lane}": picture.has_entry,
        "delayed": picture.is_delayed,
        "a suspect": picture.is_suspect,
    }
    return " and ".join(place for place, is_there in places.items() if is_there)


def _partition(job_id: JobId) -> int:
    return int(job_id.partition(".")[0])


# ---------------------------------------------------------------- between the queue and the history


def with_history(picture: JobRecords, known: HistoryRow | None) -> Finding | None:
    """Return the disagreement of queue and history about a job. The second pass rules out events in transit."""
    if known is not None and known.is_deleted:
        return None
    if picture.state is None:
        return _unknown_to_queue(picture, known) if picture.trouble == "unknown" else None
    if known is None or known.version < picture.version:
        kind = Kind.NOT_IN_HISTORY if known is None else Kind.HISTORY_DIFFERS
        return _between(kind, picture, known, version=picture.version)
    if known.version > picture.version:
        return _between(Kind.QUEUE_WENT_BACK, picture, known, version=known.version)
    if known.state != picture.state:
        return _between(Kind.HISTORY_DIFFERS, picture, known, version=picture.version)
    return None


def with_other_submissions(picture: JobRecords, rows: Sequence[HistoryRow]) -> Finding | None:
    """Return a finding if a submission that the queue has replaced by another one of the same id is open."""
    if picture.state is None:
        return None
    for row in rows:
        if row.is_open and row.submitted_ms != picture.submitted_ms:
            return _between(Kind.REPLACED, picture, row, version=0)
    return None


def _unknown_to_queue(picture: JobRecords, row: HistoryRow | None) -> Finding | None:
    """Return a finding unless the job has ended, because ended jobs expire from the queue."""
    if row is None or row.state.is_terminal:
        return None
    return _between(Kind.FORGOTTEN, picture, row, version=0)


def _between(kind: Kind, picture: JobRecords, row: HistoryRow | None, *, version: int) -> Finding:
    return Finding(
        kind=kind,
        subject=picture.id,
        job_id=picture.id,
        partition=_partition(picture.id),
        queue=describe(picture),
        history="no row" if row is None else str(row),
        version=version,
    )


def with_journal(picture: JobRecords, known: HistoryRow | None, *, has_retention: bool) -> Finding | None:
    """Return a finding for an acknowledged job without hash and row.

    With retention, the job may have ended long ago and lost its row: a journal has no times.
    """
    if picture.trouble != "unknown" or known is not None:
        return None
    return Finding(
        kind=Kind.LOST_OR_DELETED if has_retention else Kind.UNKNOWN_TO_ALL,
        subject=picture.id,
        job_id=picture.id,
        partition=_partition(picture.id),
        queue="unknown",
        history="no row",
        journal="acknowledged",
    )


def is_confirmed(first: Finding, second: Finding, picture: JobRecords | None, known: HistoryRow | None) -> bool:
    """Return whether the second pass confirms a finding, which rules out events in transit.

    Between the passes, everything that the first pass saw in the queue was recorded, unless there is a
    `HISTORY_BEHIND`. So the history must have reached the version seen then, and the queue never falls behind it.
    """
    match first.kind:
        case Kind.NOT_IN_HISTORY:
            return known is None
        case Kind.HISTORY_DIFFERS:
            return known is not None and (known.version < first.version or known.version == _version(picture))
        case Kind.QUEUE_WENT_BACK:
            return _version(picture) < first.version
        case Kind.BATCH | Kind.COUNTER | Kind.EQUATION:
            return first.drift == second.drift
        case _:
            return True


def _version(picture: JobRecords | None) -> int:
    return 0 if picture is None else picture.version
