"""What a disagreement is: judges what each source says of one job. Plain values; no I/O here."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from producer.contract import limits
from producer.contract.audit_calls import Picture
from producer.contract.states import JobState
from producer.contract.wire import JobId


class Kind(StrEnum):
    """What is wrong."""

    QUEUED_NOWHERE = "queued_nowhere"
    QUEUED_TWICE = "queued_twice"
    QUEUED_BUT_LEASED = "queued_but_leased"
    NEVER_DUE = "never_due"
    PROMPT_GONE = "prompt_gone"
    RUNNING_FOR_NOBODY = "running_for_nobody"
    RUNNING_BUT_WAITING = "running_but_waiting"
    ENDED_BUT_LEASED = "ended_but_leased"
    ENDED_BUT_WAITING = "ended_but_waiting"
    DEAD_BUT_NOT_FAILED = "dead_but_not_failed"
    NO_SUCH_JOB = "no_such_job"
    FOREIGN_KEY = "foreign_key"
    ENTRY_WITHOUT_JOB = "entry_without_job"
    LANE_UNLISTED = "lane_unlisted"
    COUNTER = "counter"
    EQUATION = "equation"
    NOT_IN_HISTORY = "not_in_history"
    HISTORY_DIFFERS = "history_differs"
    QUEUE_WENT_BACK = "queue_went_back"
    FORGOTTEN = "forgotten"
    UNKNOWN_TO_ALL = "unknown_to_all"
    LOST_OR_DELETED = "lost_or_deleted"
    HISTORY_BEHIND = "history_behind"


MENDS = "`worker audit --repair`"
WHAT_TO_DO: dict[Kind, str] = {
    Kind.QUEUED_NOWHERE: f"{MENDS} puts it back on its lane",
    Kind.QUEUED_TWICE: f"{MENDS} leaves it one place",
    Kind.QUEUED_BUT_LEASED: f"{MENDS} lets the lease go",
    Kind.NEVER_DUE: f"{MENDS} puts it on its lane",
    Kind.PROMPT_GONE: f"{MENDS} restores it from the history (with prompts) or --file; else it fails when pulled",
    Kind.RUNNING_FOR_NOBODY: f"{MENDS} returns it to the queue; it goes on at its next token",
    Kind.RUNNING_BUT_WAITING: f"{MENDS} takes it out of the waiting",
    Kind.ENDED_BUT_LEASED: f"{MENDS} forgets the lease",
    Kind.ENDED_BUT_WAITING: f"{MENDS} takes it out of the waiting",
    Kind.DEAD_BUT_NOT_FAILED: f"{MENDS} takes it out of the dead set",
    Kind.NO_SUCH_JOB: f"{MENDS} forgets what speaks of it; if history or journal know the job, re-adds it",
    Kind.FOREIGN_KEY: "something else wrote this key: look at it, delete it, then run this again",
    Kind.ENTRY_WITHOUT_JOB: f"{MENDS} takes the entry off the lane",
    Kind.LANE_UNLISTED: f"no pull finds what waits there: {MENDS} lists it again",
    Kind.COUNTER: f"{MENDS} counts anew",
    Kind.EQUATION: f"{MENDS} counts anew",
    Kind.NOT_IN_HISTORY: f"{MENDS} tells the history again",
    Kind.HISTORY_DIFFERS: f"{MENDS} tells the history again",
    Kind.QUEUE_WENT_BACK: f"Redis lost its latest writes: {MENDS} tells the history where an open job is now; one that "
    "had ended there runs again, with the same seed, unless you cancel it",
    Kind.FORGOTTEN: f"{MENDS} re-adds it, from the history (with prompts) or from its --file",
    Kind.UNKNOWN_TO_ALL: f"{MENDS} --file FILE re-adds it",
    Kind.LOST_OR_DELETED: "retention may have deleted its row after it ended, so no repair runs it again: where its "
    "output is missing, submit that line again",
    Kind.HISTORY_BEHIND: "start `worker record` (see its log), then run this again: rows could not be compared",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One disagreement: what each side says of one job, lane or counter."""

    kind: Kind
    subject: str
    """Job id, or what else it is about."""

    queue: str | None = None
    history: str | None = None
    journal: str | None = None
    partition: int = 0
    job_id: JobId | None = None
    lane: str | None = None
    entry: str | None = None
    version: int = 0
    """What the other side must have reached at the second look."""

    drift: int = 0
    """Of a counter: how much it says too much. It stays the same while jobs come and go."""

    @property
    def key(self) -> tuple[str, str]:
        """The same at both looks."""
        return self.kind, self.subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the history says of one job."""

    state: JobState
    version: int
    is_deleted: bool = False
    """On request: nothing is written of it any more."""

    def __str__(self) -> str:
        return f"{self.state} (version {self.version})"


def told(picture: Picture) -> str:
    """What the queue says of a job, in a few words."""
    if picture.state is None:
        return "unknown" if picture.trouble == "unknown" else f"key is foreign ({picture.trouble})"
    return f"{picture.state} (version {picture.version})"


# ---------------------------------------------------------------- the queue with itself


def within_queue(picture: Picture) -> Iterator[Finding]:
    """Where a job's own keys, and what speaks of it, disagree."""
    for kind, detail in _within(picture):
        queue = f"{told(picture)}, {detail}"
        yield Finding(kind=kind, subject=picture.id, job_id=picture.id, queue=queue, partition=_partition(picture.id))


def _within(picture: Picture) -> Iterator[tuple[Kind, str]]:
    match picture.state:
        case None:
            yield from _of_no_job(picture)
        case JobState.QUEUED:
            yield from _of_queued(picture)
        case JobState.RUNNING:
            yield from _of_running(picture)
        case _:
            yield from _of_ended(picture)


def _of_no_job(picture: Picture) -> Iterator[tuple[Kind, str]]:
    if picture.trouble != "unknown":
        yield Kind.FOREIGN_KEY, f"its hash is {picture.trouble}"
        return
    is_dead = picture.dead_ms is not None and picture.seen_ms - picture.dead_ms < limits.DEAD_TTL_S * 1000
    spoken = {
        "has a lease": picture.owner is not None,
        "is among the suspects": picture.is_suspect,
        "is among the delayed": picture.is_delayed,
        "is in the dead set": is_dead,
    }
    if any(spoken.values()):
        yield Kind.NO_SUCH_JOB, "but " + " and ".join(what for what, is_so in spoken.items() if is_so)


def _of_queued(picture: Picture) -> Iterator[tuple[Kind, str]]:
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


def _of_running(picture: Picture) -> Iterator[tuple[Kind, str]]:
    if not picture.owner:
        yield Kind.RUNNING_FOR_NOBODY, "no lease" if picture.owner is None else "its lease was given back"
    elif not picture.is_held:
        yield Kind.RUNNING_FOR_NOBODY, f"its owner {picture.owner} does not hold it"
    elif not picture.is_owner_listed:
        yield Kind.RUNNING_FOR_NOBODY, f"its owner {picture.owner} is not known"
    elif picture.lease_epoch != picture.epoch:
        yield Kind.RUNNING_FOR_NOBODY, f"its lease has epoch {picture.lease_epoch}, the job {picture.epoch}"
    if picture.is_delayed or picture.is_suspect:
        yield Kind.RUNNING_BUT_WAITING, _places(picture)
    if not picture.has_payload:
        yield Kind.PROMPT_GONE, "no payload: no other worker could go on"


def _of_ended(picture: Picture) -> Iterator[tuple[Kind, str]]:
    if picture.owner is not None:
        yield Kind.ENDED_BUT_LEASED, f"lease of {picture.owner or 'nobody'}"
    if picture.is_delayed or picture.is_suspect:
        yield Kind.ENDED_BUT_WAITING, _places(picture)
    if picture.dead_ms is not None and picture.state is not JobState.FAILED:
        yield Kind.DEAD_BUT_NOT_FAILED, "in the dead set"


def _places(picture: Picture) -> str:
    places = {
        f"on lane {picture.lane}": picture.has_entry,
        "delayed": picture.is_delayed,
        "a suspect": picture.is_suspect,
    }
    return " and ".join(place for place, is_there in places.items() if is_there)


def _partition(job_id: JobId) -> int:
    return int(job_id.partition(".")[0])


# ---------------------------------------------------------------- the queue with the history


def with_history(picture: Picture, known: Known | None) -> Finding | None:
    """Where queue and history disagree about a job; what is on its way is told from it by the second look."""
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


def _unknown_to_queue(picture: Picture, known: Known | None) -> Finding | None:
    """An ended job is forgotten in time, as it should be."""
    if known is None or known.state.is_terminal:
        return None
    return _between(Kind.FORGOTTEN, picture, known, version=0)


def _between(kind: Kind, picture: Picture, known: Known | None, *, version: int) -> Finding:
    return Finding(
        kind=kind,
        subject=picture.id,
        job_id=picture.id,
        partition=_partition(picture.id),
        queue=told(picture),
        history="no row" if known is None else str(known),
        version=version,
    )


def with_journal(picture: Picture, known: Known | None, *, has_retention: bool) -> Finding | None:
    """An acknowledged job that nobody knows. A journal has no times: with retention it may have ended long ago."""
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


def is_confirmed(first: Finding, second: Finding, picture: Picture | None, known: Known | None) -> bool:
    """Whether the second look says the same: what is only on its way has arrived by then.

    Between the looks, everything that the first one saw in the queue was recorded (or `HISTORY_BEHIND` says that it
    was not). So the history must have reached the version seen then, and the queue never goes back behind the history.
    """
    match first.kind:
        case Kind.NOT_IN_HISTORY:
            return known is None
        case Kind.HISTORY_DIFFERS:
            return known is not None and (known.version < first.version or known.version == _version(picture))
        case Kind.QUEUE_WENT_BACK:
            return _version(picture) < first.version
        case Kind.COUNTER | Kind.EQUATION:
            return first.drift == second.drift
        case _:
            return True


def _version(picture: Picture | None) -> int:
    return 0 if picture is None else picture.version
