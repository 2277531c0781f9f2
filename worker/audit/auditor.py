"""The audit in two passes. Read `Auditor.audit` first. Knows no command line."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from sluice.protocol.calls.audit import JobRecords, PartitionCounts
from sluice.protocol.calls.base import read_stream_id
from sluice.protocol.wire import JobId
from sluice.worker.audit.findings import (
    Finding,
    HistoryRow,
    Kind,
    is_confirmed,
    row_of,
    with_history,
    with_journal,
    with_other_submissions,
    within_queue,
)
from sluice.worker.audit.history_side import HistorySide
from sluice.worker.audit.queue_side import QueueSide, in_slices

MAX_KEPT = 10_000
"""Maximum number of findings to keep. More are only counted; a second run finds them."""

POLL_S = 0.05
RETENTION_SLACK_MS = 2 * 3_600_000
"""Margin for retention, which works by the hour."""

_NEED_HISTORY = frozenset(
    {
        Kind.NOT_IN_HISTORY,
        Kind.HISTORY_DIFFERS,
        Kind.FORGOTTEN,
        Kind.REPLACED,
        Kind.UNKNOWN_TO_ALL,
        Kind.LOST_OR_DELETED,
    }
)
_OF_PARTITION = frozenset({Kind.ENTRY_WITHOUT_JOB, Kind.LANE_UNLISTED, Kind.BATCH, Kind.COUNTER, Kind.EQUATION})
_MISPLACED = frozenset(
    {
        Kind.QUEUED_NOWHERE,
        Kind.QUEUED_TWICE,
        Kind.QUEUED_BUT_LEASED,
        Kind.RUNNING_WITHOUT_OWNER,
        Kind.LEASED_TWICE,
        Kind.RUNNING_BUT_WAITING,
        Kind.ENDED_BUT_LEASED,
        Kind.ENDED_BUT_WAITING,
        Kind.NO_SUCH_JOB,
        Kind.ENTRY_WITHOUT_JOB,
        Kind.FOREIGN_KEY,
    }
)
Suspicions = dict[tuple[str, str], Finding]
JournalIds = Callable[[int], Iterable[JobId]]
"""Iterates over the acknowledged jobs of a partition; may be called repeatedly."""


@dataclass(slots=True, eq=False)
class AuditReport:
    """The result of an audit. Changes during the audit and the repair."""

    findings: list[Finding] = field(default_factory=list[Finding])
    num_more: int = 0
    """Findings beyond those that are kept."""

    counters: Counter[str] = field(default_factory=Counter[str])
    jobs: Counter[str] = field(default_factory=Counter[str])
    """In the queue, by state."""

    history: Mapping[str, int] | None = None
    num_journal: int | None = None
    notes: list[str] = field(default_factory=list[str])
    done: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    """The repair of each finding, by its key."""


class Auditor:
    """One audit of one queue."""

    def __init__(
        self,
        sides: Sequence[QueueSide],
        history: HistorySide | None,
        journal: JournalIds | None,
        *,
        pause_s: float,
        history_s: float,
        retention_ms: float | None,
    ) -> None:
        """Audit nothing yet.

        Args:
            sides: The partitions.
            history: The history, if it is compared.
            journal: The jobs that a producer's journal has, if there is one.
            pause_s: Pause between the two passes.
            history_s: Maximum wait for the recorder to write what the first pass saw.
            retention_ms: Age of ended jobs whose rows may be deleted; None if rows are kept.
        """
        self._sides = sides
        self._history = history
        self._journal = journal
        self._pause_s, self._history_s, self._retention_ms = pause_s, history_s, retention_ms

    def audit(self) -> AuditReport:
        """Compare all sources twice, and report what both passes see.

        Raises:
            redis.RedisError, sqlalchemy.exc.SQLAlchemyError: a source does not answer.
        """
        report = AuditReport()
        first = {side.keys.partition: self._first_pass(side, report) for side in self._sides}
        without_settings = [side for side in self._sides if list(self._lost_settings(side))]
        marks = [(side, side.state().outbox_last) for side in self._sides]
        time.sleep(self._pause_s)
        behind = self._wait_for_history(marks)
        for side in self._sides:
            suspected = first[side.keys.partition]
            if side.keys.partition in behind:
                suspected = {key: finding for key, finding in suspected.items() if finding.kind not in _NEED_HISTORY}
                report.findings.append(behind[side.keys.partition])
            report.findings += _without_consequences(list(self._second_pass(side, suspected)))
        report.findings += [finding for side in without_settings for finding in self._lost_settings(side)]
        report.history = None if self._history is None else self._history.totals()
        return report

    # ------------------------------------------------------------ the first pass

    def _first_pass(self, side: QueueSide, report: AuditReport) -> Suspicions:
        suspicions: Suspicions = {}
        for finding in chain(
            self._existing_jobs(side, report),
            self._referenced(side),
            self._known_elsewhere(side, report),
            _places(side),
        ):
            if len(suspicions) < MAX_KEPT:
                suspicions[finding.key] = finding
            else:
                report.num_more += 1
        _add_counters(report, side.state())
        return suspicions

    def _existing_jobs(self, side: QueueSide, report: AuditReport) -> Iterator[Finding]:
        for ids in in_slices(side.job_ids()):
            all_records = list(side.records_of(ids))
            rows = self._rows_of(ids)
            for records in all_records:
                report.jobs[records.state or "foreign"] += records.problem != "unknown"
                yield from self._judge(records, rows.get(records.id, ()))

    def _referenced(self, side: QueueSide) -> Iterator[Finding]:
        """Yield findings on jobs without a row that leases or sets refer to, and on leases of others than the owner."""
        for records in side.records_of(side.referenced_jobs()):
            if records.state is None or records.strays:
                yield from within_queue(records)

    def _known_elsewhere(self, side: QueueSide, report: AuditReport) -> Iterator[Finding]:
        partition = side.keys.partition
        if self._history is not None:
            for ids in in_slices(self._history.open_jobs(partition)):
                yield from self._unknown_here(side, ids)
        if self._journal is not None and self._history is not None:
            report.num_journal = report.num_journal or 0
            for ids in in_slices(self._journal(partition)):
                report.num_journal += len(ids)
                yield from self._unknown_here(side, ids)

    def _unknown_here(self, side: QueueSide, ids: Sequence[JobId]) -> Iterator[Finding]:
        """Yield findings on those of the ids, open in the history or acknowledged in the journal, that have no row."""
        unknown = side.unknown(list(ids))
        rows = self._rows_of(unknown)
        for records in side.records_of(unknown):
            yield from self._elsewhere(records, rows.get(records.id, ()))

    def _elsewhere(self, records: JobRecords, rows: Sequence[HistoryRow]) -> Iterator[Finding]:
        row, has_retention = row_of(records, rows), self._retention_ms is not None
        finding = with_history(records, row) or with_journal(records, row, has_retention=has_retention)
        yield from filter(None, (finding, with_other_submissions(records, rows)))

    def _lost_settings(self, side: QueueSide) -> Iterator[Finding]:
        """Yield a finding if a worker served the partition before its settings began."""
        partition = side.keys.partition
        pulled_ms = None if self._history is None else self._history.first_pull_ms(partition)
        lost = None if pulled_ms is None else side.lost_settings(pulled_ms)
        if lost is not None:
            yield Finding(
                kind=Kind.SETTINGS_LOST,
                subject=f"{partition}: settings",
                partition=partition,
                queue=lost,
                history=f"a worker served it at {pulled_ms}",
            )

    def _judge(self, records: JobRecords, rows: Sequence[HistoryRow]) -> Iterator[Finding]:
        yield from within_queue(records)
        if self._history is not None and not self._is_past_retention(records):
            finding = with_history(records, row_of(records, rows))
            yield from filter(None, (finding, with_other_submissions(records, rows)))

    def _is_past_retention(self, records: JobRecords) -> bool:
        keep_ms = self._retention_ms
        if keep_ms is None or records.ended_ms is None:
            return False
        return records.seen_ms - records.ended_ms > keep_ms - RETENTION_SLACK_MS

    def _rows_of(self, ids: Sequence[JobId]) -> Mapping[JobId, Sequence[HistoryRow]]:
        return {} if self._history is None else self._history.rows_of(ids)

    # ------------------------------------------------------------ between the passes

    def _wait_for_history(self, marks: Sequence[tuple[QueueSide, str]]) -> dict[int, Finding]:
        """Wait until everything up to the marks is recorded. Return a finding for each partition that is late."""
        until_s = time.monotonic() + self._history_s
        late: dict[int, Finding] = {}
        for side, mark in marks if self._history is not None else ():
            while _is_before(oldest := side.oldest_event(), mark) and time.monotonic() < until_s:
                time.sleep(POLL_S)
            if _is_before(oldest, mark):
                late[side.keys.partition] = _behind(side, oldest)
        return late

    # ------------------------------------------------------------ the second pass

    def _second_pass(self, side: QueueSide, suspected: Suspicions) -> Iterator[Finding]:
        jobs = [finding for finding in suspected.values() if finding.job_id is not None]
        for job_slice in in_slices(jobs):
            yield from self._jobs_again(side, job_slice)
        if any(finding.kind in _OF_PARTITION for finding in suspected.values()):
            for second in _places(side):
                first = suspected.get(second.key)
                if first is not None and is_confirmed(first, second, None, None):
                    yield second

    def _jobs_again(self, side: QueueSide, suspected: Sequence[Finding]) -> Iterator[Finding]:
        ids = list(dict.fromkeys(finding.job_id for finding in suspected if finding.job_id is not None))
        rows_by_id = self._rows_of(ids)
        all_records = {records.id: records for records in side.records_of(ids)}
        for first in suspected:
            assert first.job_id is not None
            records, rows = all_records[first.job_id], rows_by_id.get(first.job_id, ())
            for second in chain(within_queue(records), self._elsewhere(records, rows)):
                if second.key == first.key and is_confirmed(first, second, records, row_of(records, rows)):
                    yield second


def _without_consequences(findings: list[Finding]) -> list[Finding]:
    """Drop findings on counters while jobs are misplaced, since they follow from these; a repair recounts anyway."""
    is_misplaced = any(finding.kind in _MISPLACED for finding in findings)
    return [finding for finding in findings if not (is_misplaced and finding.kind in (Kind.COUNTER, Kind.EQUATION))]


def _places(side: QueueSide) -> Iterator[Finding]:
    yield from side.walk_waiting()
    yield from side.wrong_batches()
    yield from side.wrong_counts(side.counts())


def _behind(side: QueueSide, oldest: str | None) -> Finding:
    entries = side.state().outbox_entries
    return Finding(
        kind=Kind.HISTORY_BEHIND,
        subject=f"{side.keys.partition}: outbox",
        partition=side.keys.partition,
        queue=f"{entries} entries are not recorded, the oldest is {oldest}",
    )


def _is_before(event: str | None, mark: str) -> bool:
    return event is not None and read_stream_id(event) <= read_stream_id(mark)


def _add_counters(report: AuditReport, counts: PartitionCounts) -> None:
    names = {"waiting_jobs": "queued", "running_jobs": "running"}
    for name in ("submitted", "done", "failed", "cancelled", "expired", *names):
        report.counters[names.get(name, name)] += counts.counters.get(name, 0)
