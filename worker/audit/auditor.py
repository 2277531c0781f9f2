"""The audit: look, wait, look again. Read `Auditor.audit` first. Knows no command line."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from producer.contract.audit_calls import Counts, Picture
from producer.contract.wire import JobId
from worker.audit.findings import Finding, Kind, Known, is_confirmed, with_history, with_journal, within_queue
from worker.audit.history_side import HistorySide
from worker.audit.queue_side import QueueSide, in_bites

MAX_KEPT = 10_000
"""Findings that are kept whole; what is beyond them is only counted, and found by the next run."""

POLL_S = 0.05
RETENTION_SLACK_MS = 2 * 3_600_000
"""Retention works by the hour."""

_NEED_HISTORY = frozenset(
    {Kind.NOT_IN_HISTORY, Kind.HISTORY_DIFFERS, Kind.FORGOTTEN, Kind.UNKNOWN_TO_ALL, Kind.LOST_OR_DELETED}
)
_OF_PARTITION = frozenset({Kind.ENTRY_WITHOUT_JOB, Kind.LANE_UNLISTED, Kind.COUNTER, Kind.EQUATION})
_MISPLACED = frozenset(
    {
        Kind.QUEUED_NOWHERE,
        Kind.QUEUED_TWICE,
        Kind.RUNNING_FOR_NOBODY,
        Kind.RUNNING_BUT_WAITING,
        Kind.ENDED_BUT_WAITING,
        Kind.NO_SUCH_JOB,
        Kind.ENTRY_WITHOUT_JOB,
        Kind.FOREIGN_KEY,
    }
)
Found = dict[tuple[str, str], Finding]
JournalIds = Callable[[int], Iterable[JobId]]
"""Acknowledged jobs of a partition, each time anew."""


@dataclass(slots=True, eq=False)
class Report:
    """What came out. Changes while it is made, and when things are repaired."""

    findings: list[Finding] = field(default_factory=list[Finding])
    num_more: int = 0
    """Beyond those that are kept."""

    counters: Counter[str] = field(default_factory=Counter[str])
    hashes: Counter[str] = field(default_factory=Counter[str])
    history: Mapping[str, int] | None = None
    num_journal: int | None = None
    notes: list[str] = field(default_factory=list[str])
    done: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    """What a repair did, by the finding's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for what."""

    pause_s: float = 2.0
    """Between the two looks."""

    history_s: float = 30.0
    """For the recorder to write what the first look saw."""

    retention_ms: float | None = None
    """Rows of jobs that ended longer ago are not expected in the history."""

    @property
    def has_retention(self) -> bool:
        """Whether rows are deleted at all."""
        return self.retention_ms is not None


class Auditor:
    """One audit of one queue."""

    def __init__(
        self,
        sides: Sequence[QueueSide],
        history: HistorySide | None,
        journal: JournalIds | None,
        patience: Patience,
    ) -> None:
        self._sides = sides
        self._history = history
        self._journal = journal
        self._patience = patience

    def audit(self) -> Report:
        """Compare all sources, twice; what both looks say is in the report.

        Raises:
            redis.RedisError, sqlalchemy.exc.SQLAlchemyError: a source does not answer.
        """
        report = Report()
        first = {side.keys.partition: self._look(side, report) for side in self._sides}
        marks = [(side, side.counts().stamp) for side in self._sides]
        time.sleep(self._patience.pause_s)
        behind = self._wait_for_history(marks)
        for side in self._sides:
            suspected = first[side.keys.partition]
            if side.keys.partition in behind:
                suspected = {key: one for key, one in suspected.items() if one.kind not in _NEED_HISTORY}
                report.findings.append(behind[side.keys.partition])
            report.findings += _without_consequences(list(self._look_again(side, suspected)))
        report.history = None if self._history is None else self._history.totals()
        return report

    # ------------------------------------------------------------ the first look

    def _look(self, side: QueueSide, report: Report) -> Found:
        found: Found = {}
        for finding in chain(
            self._jobs_there(side, report), self._spoken_of(side), self._known_elsewhere(side, report), _places(side)
        ):
            if len(found) < MAX_KEPT:
                found[finding.key] = finding
            else:
                report.num_more += 1
        _add_counters(report, side.counts())
        return found

    def _jobs_there(self, side: QueueSide, report: Report) -> Iterator[Finding]:
        for ids in in_bites(side.job_ids()):
            pictures = list(side.pictures(ids))
            known = self._known(ids)
            for picture in pictures:
                report.hashes[picture.state or "foreign"] += picture.trouble != "unknown"
                yield from self._judged(picture, known)

    def _spoken_of(self, side: QueueSide) -> Iterator[Finding]:
        """Jobs without a hash that something speaks of; the others have been looked at."""
        for picture in side.pictures(side.spoken_of()):
            if picture.state is None:
                yield from within_queue(picture)

    def _known_elsewhere(self, side: QueueSide, report: Report) -> Iterator[Finding]:
        partition = side.keys.partition
        if self._history is not None:
            for ids in in_bites(self._history.open_jobs(partition)):
                yield from self._unknown_here(side, ids)
        if self._journal is not None and self._history is not None:
            report.num_journal = report.num_journal or 0
            for ids in in_bites(self._journal(partition)):
                report.num_journal += len(ids)
                yield from self._unknown_here(side, ids)

    def _unknown_here(self, side: QueueSide, ids: Sequence[JobId]) -> Iterator[Finding]:
        """What the history knew as open, or the journal as acknowledged, when it named these ids."""
        unknown = side.unknown(list(ids))
        known = self._known(unknown)
        for picture in side.pictures(unknown):
            yield from self._elsewhere(picture, known.get(picture.id))

    def _elsewhere(self, picture: Picture, known: Known | None) -> Iterator[Finding]:
        finding = with_history(picture, known) or with_journal(
            picture, known, has_retention=self._patience.has_retention
        )
        if finding is not None:
            yield finding

    def _judged(self, picture: Picture, known: Mapping[JobId, Known]) -> Iterator[Finding]:
        yield from within_queue(picture)
        if self._history is not None and not self._is_past_retention(picture):
            finding = with_history(picture, known.get(picture.id))
            if finding is not None:
                yield finding

    def _is_past_retention(self, picture: Picture) -> bool:
        keep_ms = self._patience.retention_ms
        if keep_ms is None or picture.ended_ms is None:
            return False
        return picture.seen_ms - picture.ended_ms > keep_ms - RETENTION_SLACK_MS

    def _known(self, ids: Sequence[JobId]) -> Mapping[JobId, Known]:
        return {} if self._history is None else self._history.known(ids)

    # ------------------------------------------------------------ between the looks

    def _wait_for_history(self, marks: Sequence[tuple[QueueSide, str]]) -> dict[int, Finding]:
        """Until everything up to the marks is recorded; a finding for each partition where it is not in time."""
        until_s = time.monotonic() + self._patience.history_s
        late: dict[int, Finding] = {}
        for side, mark in marks if self._history is not None else ():
            while _is_before(oldest := side.oldest_event(), mark) and time.monotonic() < until_s:
                time.sleep(POLL_S)
            if _is_before(oldest, mark):
                late[side.keys.partition] = _behind(side, oldest)
        return late

    # ------------------------------------------------------------ the second look

    def _look_again(self, side: QueueSide, suspected: Found) -> Iterator[Finding]:
        jobs = [one for one in suspected.values() if one.job_id is not None]
        for bite in in_bites(jobs):
            yield from self._jobs_again(side, bite)
        if any(one.kind in _OF_PARTITION for one in suspected.values()):
            for second in _places(side):
                first = suspected.get(second.key)
                if first is not None and is_confirmed(first, second, None, None):
                    yield second

    def _jobs_again(self, side: QueueSide, suspected: Sequence[Finding]) -> Iterator[Finding]:
        ids = list(dict.fromkeys(one.job_id for one in suspected if one.job_id is not None))
        known = self._known(ids)
        pictures = {picture.id: picture for picture in side.pictures(ids)}
        for first in suspected:
            assert first.job_id is not None
            picture, row = pictures[first.job_id], known.get(first.job_id)
            for second in chain(within_queue(picture), self._elsewhere(picture, row)):
                if second.key == first.key and is_confirmed(first, second, picture, row):
                    yield second


def _without_consequences(findings: list[Finding]) -> list[Finding]:
    """Counters say nothing of their own while jobs are at the wrong place; a repair counts anew in any case."""
    is_misplaced = any(one.kind in _MISPLACED for one in findings)
    return [one for one in findings if not (is_misplaced and one.kind in (Kind.COUNTER, Kind.EQUATION))]


def _places(side: QueueSide) -> Iterator[Finding]:
    yield from side.walk_waiting()
    yield from side.wrong_counts(side.counts())


def _behind(side: QueueSide, oldest: str | None) -> Finding:
    entries = side.counts().outbox_entries
    return Finding(
        kind=Kind.HISTORY_BEHIND,
        subject=f"{side.keys.partition}: outbox",
        partition=side.keys.partition,
        queue=f"{entries} entries are not recorded, the oldest is {oldest}",
    )


def _is_before(event: str | None, mark: str) -> bool:
    return event is not None and _moment(event) <= _moment(mark)


def _moment(stream_id: str) -> tuple[int, int]:
    time_ms, _, number = stream_id.partition("-")
    return int(time_ms), int(number or 0)


def _add_counters(report: Report, counts: Counts) -> None:
    names = {"waiting_jobs": "queued", "running_jobs": "running"}
    for name in ("submitted", "done", "failed", "cancelled", "expired", *names):
        report.counters[names.get(name, name)] += counts.counters.get(name, 0)
