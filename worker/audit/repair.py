"""Repair what an audit found. Every change is a script that checks again before it writes. Knows no SQL."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sluice.protocol import limits
from sluice.protocol.calls import Accepted, Call, Conflict, Duplicate, NewJob, Refused, SubmitReply, submit
from sluice.protocol.calls.audit import (
    repair_batches,
    repair_jobs,
    repair_lane,
    republish_events,
    restore_prompt,
)
from sluice.protocol.redis.execution import run
from sluice.protocol.wire import JobId
from sluice.worker.audit.auditor import AuditReport
from sluice.worker.audit.findings import Finding, HistoryRow, Kind, row_of
from sluice.worker.audit.history_side import HistorySide
from sluice.worker.audit.lost_jobs import LostJobs
from sluice.worker.audit.queue_side import QueueSide, in_slices
from sluice.worker.connection.clients import Client

PLAUSIBLE_VERSION = limits.MAX_VERSION // 2
_LOST = frozenset({Kind.FORGOTTEN, Kind.UNKNOWN_TO_ALL})
_OF_JOBS = frozenset(
    {
        Kind.QUEUED_NOWHERE,
        Kind.QUEUED_TWICE,
        Kind.QUEUED_BUT_LEASED,
        Kind.NEVER_DUE,
        Kind.RUNNING_WITHOUT_OWNER,
        Kind.RUNNING_BUT_WAITING,
        Kind.ENDED_BUT_LEASED,
        Kind.LEASED_TWICE,
        Kind.ENDED_BUT_WAITING,
        Kind.DEAD_BUT_NOT_FAILED,
        Kind.NO_SUCH_JOB,
        Kind.BATCH_MEMBER,
        Kind.CHANNEL_OPEN,
    }
)
_LEFT = {
    Kind.LOST_OR_DELETED: "left: it may have ended long ago and would run twice",
    Kind.REPLACED: "left: another submission has its id",
}
_OF_COUNTERS = frozenset({Kind.LANE_UNLISTED, Kind.COUNTER, Kind.EQUATION})
_UNRECORDED = frozenset({Kind.NOT_IN_HISTORY, Kind.HISTORY_DIFFERS, Kind.QUEUE_WENT_BACK})


class Repair:
    """The repair of one queue after an audit. It notes in the report what it did about each finding."""

    def __init__(
        self, client: Client, history: HistorySide | None, sources: Sequence[LostJobs], report: AuditReport
    ) -> None:
        self._client = client
        self._history = history
        self._sources = sources
        self._report = report

    def repair(self, side: QueueSide) -> None:
        """Repair one partition, in an order in which no step undoes another."""
        mine = [finding for finding in self._report.findings if finding.partition == side.keys.partition]
        self._repair_jobs(side, [finding for finding in mine if finding.kind in _OF_JOBS])
        self._repair_lanes(side, [finding for finding in mine if finding.kind is Kind.ENTRY_WITHOUT_JOB])
        self._submit_again(side, [finding for finding in mine if finding.kind in _LOST])
        for finding in mine:
            if finding.kind in _LEFT:
                self._note(finding, _LEFT[finding.kind])
        self._restore_prompts(side, [finding for finding in mine if finding.kind is Kind.PROMPT_GONE])
        self._republish(side, [finding for finding in mine if finding.kind in _UNRECORDED])
        self._repair_batches(side, mine)
        if mine:
            self._repair_counters(side, [finding for finding in mine if finding.kind in _OF_COUNTERS])

    def _run(self, call: Call[Any]) -> Any:  # noqa: ANN401  # replies of several kinds
        return run(self._client, call)

    def _note(self, finding: Finding, done: str) -> None:
        self._report.done[finding.key] = done

    # ------------------------------------------------------------ within the queue

    def _repair_jobs(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        for job_slice in in_slices(findings, limits.SLICE_JOBS):
            ids = [_job_id(finding) for finding in job_slice]
            for finding, done in zip(job_slice, self._run(repair_jobs(side.keys, ids, side.holders)), strict=True):
                self._note(finding, done or "nothing left to do")

    def _repair_lanes(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        for finding in findings:
            assert finding.lane is not None
            assert finding.entry is not None
            (is_done,) = self._run(repair_lane(side.keys, finding.lane, [finding.entry]))
            self._note(finding, "removed from the lane" if is_done else "nothing left to do")

    def _repair_batches(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        """Count every batch again: the repairs of jobs have changed some."""
        for batches in in_slices(sorted(side.batches) if findings else [], limits.SLICE_JOBS):
            self._run(repair_batches(side.keys, batches))
        for finding in findings:
            if finding.kind is Kind.BATCH:
                self._note(finding, "recounted")

    def _repair_counters(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        for _ in side.walk_waiting():
            pass  # for its sums; its findings are known
        changed = [name for call in side.repairs_of_counters() for name in self._run(call)]
        is_moving = not side.sums.stamp
        for finding in findings:
            is_sum = finding.subject.endswith(("tokens", "bytes"))
            self._note(finding, "left: jobs came and went during the count" if is_sum and is_moving else "recounted")
        if changed and not findings:
            self._report.notes.append(f"partition {side.keys.partition}: recounted: {', '.join(changed)}")

    # ------------------------------------------------------------ lost jobs

    def _submit_again(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        added: list[JobId] = []

        def add(job: NewJob) -> str:
            key = side.keys.channel(job.id)
            if self._client.exists(key):
                return f"not re-added: {key} has some of its tokens; delete that key first"
            # One at a time, because a prompt may be as large as the limit of a call.
            (answer,) = self._run(submit(side.keys, [job]))
            if isinstance(answer, Accepted):
                added.append(job.id)
            return _answer_text(answer)

        self._with_jobs(findings, add, otherwise="not re-added")
        self._publish_events(side, added)

    def _restore_prompts(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        def restore(job: NewJob) -> str:
            (is_done,) = self._run(restore_prompt(side.keys, [(job.id, job.payload)]))
            return "prompt restored" if is_done else "not restored: the prompt exists, or differs"

        self._with_jobs(findings, restore, otherwise="not restored")

    def _with_jobs(self, findings: Sequence[Finding], use: Callable[[NewJob], str], *, otherwise: str) -> None:
        """Call `use` with each finding's job, from the first source that has it."""
        missing = {_job_id(finding): finding for finding in findings}
        for finding in findings:
            self._note(finding, f"{otherwise}: neither a history with prompts nor a --file has it")
        for source in self._sources:
            for job_id, job in source(list(missing)):
                if isinstance(job, NewJob):
                    self._note(missing.pop(job_id), use(job))
                else:
                    self._note(missing[job_id], f"{otherwise}: {job}")

    # ------------------------------------------------------------ missing history

    def _republish(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        """Publish the jobs' events again, except for jobs whose end in the history would be undone."""
        republished = [
            finding
            for finding in findings
            if finding.kind is not Kind.QUEUE_WENT_BACK or not self._had_ended(side, finding)
        ]
        self._publish_events(side, [_job_id(finding) for finding in republished], has_rows=True)
        for finding in findings:
            self._note(finding, "events republished" if finding in republished else "left: its end is in the history")

    def _had_ended(self, side: QueueSide, finding: Finding) -> bool:
        job_id = _job_id(finding)
        (records,) = side.records_of([job_id])
        row = row_of(records, self._rows_of([job_id]).get(job_id, ()))
        is_open = records.state is not None and not records.state.is_terminal
        return row is not None and row.state.is_terminal and is_open

    def _publish_events(self, side: QueueSide, job_ids: Sequence[JobId], *, has_rows: bool = False) -> None:
        """Publish the jobs' events with versions above the history's, which ignores older ones."""
        for job_slice in in_slices(job_ids, limits.SLICE_JOBS):
            by_id = self._rows_of(job_slice)
            newest = {records.id: row_of(records, by_id.get(records.id, ())) for records in side.records_of(job_slice)}
            self._reset_forged(newest)
            rows = [(job_id, row.version if row else 0) for job_id, row in newest.items()]
            rows = rows if has_rows else [(job_id, version) for job_id, version in rows if version > 1]
            if rows:
                self._run(republish_events(side.keys, rows))

    def _reset_forged(self, rows: dict[JobId, HistoryRow | None]) -> None:
        """Begin again with rows whose version no job reaches: the user that forged it has used up the numbers."""
        forged = {job_id: row for job_id, row in rows.items() if row is not None and row.version > PLAUSIBLE_VERSION}
        if self._history is not None and forged:
            self._history.reset_versions([(job_id, row.submitted_ms) for job_id, row in forged.items()])
            rows |= {job_id: replace(row, version=0) for job_id, row in forged.items()}

    def _rows_of(self, job_ids: Sequence[JobId]) -> dict[JobId, list[HistoryRow]]:
        return {} if self._history is None else self._history.rows_of(job_ids)


def _job_id(finding: Finding) -> JobId:
    assert finding.job_id is not None
    return finding.job_id


def _answer_text(answer: SubmitReply) -> str:
    match answer:
        case Accepted():
            return "re-added"
        case Duplicate(state=state):
            return f"it exists after all: {state}"
        case Conflict(id=other):
            return f"not re-added: its key belongs to job {other}"
        case Refused(message=message):
            return f"not re-added: {message}"
