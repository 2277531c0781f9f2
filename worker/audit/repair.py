"""Mend what an audit found. Every change is a script's that looks again before it writes. Knows no SQL."""

from collections.abc import Callable, Sequence
from typing import Any

from producer.contract import limits
from producer.contract.audit_calls import mend_counters, mend_jobs, mend_lane, restore_prompt, tell_again
from producer.contract.calls import Accepted, Call, Conflict, Duplicate, NewJob, Refused, SubmitAnswer, submit
from producer.contract.running import run
from producer.contract.wire import JobId
from worker.audit.auditor import Report
from worker.audit.findings import Finding, Kind
from worker.audit.history_side import HistorySide
from worker.audit.lost_jobs import LostJobs
from worker.audit.queue_side import QueueSide, in_bites
from worker.connections import Client

_LOST = frozenset({Kind.FORGOTTEN, Kind.UNKNOWN_TO_ALL})
_OF_JOBS = frozenset(
    {
        Kind.QUEUED_NOWHERE,
        Kind.QUEUED_TWICE,
        Kind.QUEUED_BUT_LEASED,
        Kind.NEVER_DUE,
        Kind.RUNNING_FOR_NOBODY,
        Kind.RUNNING_BUT_WAITING,
        Kind.ENDED_BUT_LEASED,
        Kind.ENDED_BUT_WAITING,
        Kind.DEAD_BUT_NOT_FAILED,
        Kind.NO_SUCH_JOB,
    }
)
_OF_COUNTERS = frozenset({Kind.LANE_UNLISTED, Kind.COUNTER, Kind.EQUATION})
_UNTOLD = frozenset({Kind.NOT_IN_HISTORY, Kind.HISTORY_DIFFERS, Kind.QUEUE_WENT_BACK})


class Repair:
    """Mends one queue after one audit; says in the report what was done about each finding."""

    def __init__(
        self, client: Client, history: HistorySide | None, sources: Sequence[LostJobs], report: Report
    ) -> None:
        self._client = client
        self._history = history
        self._sources = sources
        self._report = report

    def mend(self, side: QueueSide) -> None:
        """Mend what was found in one partition, in an order in which no step spoils the next."""
        mine = [one for one in self._report.findings if one.partition == side.keys.partition]
        self._mend_jobs(side, [one for one in mine if one.kind in _OF_JOBS])
        self._mend_lanes(side, [one for one in mine if one.kind is Kind.ENTRY_WITHOUT_JOB])
        self._add_again(side, [one for one in mine if one.kind in _LOST])
        for finding in mine:
            if finding.kind is Kind.LOST_OR_DELETED:
                self._note(finding, "left: it may have ended long ago, and would run a second time")
        self._restore_prompts(side, [one for one in mine if one.kind is Kind.PROMPT_GONE])
        self._tell_again(side, [one for one in mine if one.kind in _UNTOLD])
        if mine:
            self._mend_counters(side, [one for one in mine if one.kind in _OF_COUNTERS])

    def _run(self, call: Call[Any]) -> Any:  # noqa: ANN401  # replies of several kinds
        return run(self._client, call)

    def _note(self, finding: Finding, done: str) -> None:
        self._report.done[finding.key] = done

    # ------------------------------------------------------------ the queue with itself

    def _mend_jobs(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        for bite in in_bites(findings, limits.MAX_BITE):
            ids = [_job_id(one) for one in bite]
            for finding, done in zip(bite, self._run(mend_jobs(side.keys, ids)), strict=True):
                self._note(finding, done or "nothing left to do")

    def _mend_lanes(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        for finding in findings:
            assert finding.lane is not None
            assert finding.entry is not None
            (is_done,) = self._run(mend_lane(side.keys, finding.lane, [finding.entry]))
            self._note(finding, "taken off the lane" if is_done else "nothing left to do")

    def _mend_counters(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        for _ in side.walk_waiting():
            pass  # only for its sums: what it finds now was found before
        changed = self._run(mend_counters(side.keys, sorted(side.lanes), side.sums))
        is_moving = not side.sums.stamp
        for finding in findings:
            is_sum = finding.subject.endswith(("tokens", "bytes"))
            self._note(finding, "left: jobs came and went" if is_sum and is_moving else "counted anew")
        if changed and not findings:
            self._report.notes.append(f"partition {side.keys.partition}: counted anew: {', '.join(changed)}")

    # ------------------------------------------------------------ what the queue forgot

    def _add_again(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        added: list[JobId] = []

        def add(job: NewJob) -> str:
            key = side.keys.channel(job.id)
            if self._client.exists(key):
                return f"not re-added: tokens of it are on {key}; delete that key first"
            # One at a time: a prompt may be as large as a call may be.
            (answer,) = self._run(submit(side.keys, [job]))
            if isinstance(answer, Accepted):
                added.append(job.id)
            return _outcome(answer)

        self._with_jobs(findings, add, otherwise="not re-added")
        self._tell_where(side, added)

    def _restore_prompts(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        def restore(job: NewJob) -> str:
            (is_done,) = self._run(restore_prompt(side.keys, [(job.id, job.payload)]))
            return "prompt restored" if is_done else "not restored: it is there, or was another"

        self._with_jobs(findings, restore, otherwise="not restored")

    def _with_jobs(self, findings: Sequence[Finding], use: Callable[[NewJob], str], *, otherwise: str) -> None:
        """Use each finding's job as it was submitted, from the first source that has it."""
        missing = {_job_id(one): one for one in findings}
        for finding in findings:
            self._note(finding, f"{otherwise}: neither a history with prompts nor a --file has it")
        for source in self._sources:
            for job_id, job in source.jobs(list(missing)):
                if isinstance(job, NewJob):
                    self._note(missing.pop(job_id), use(job))
                else:
                    self._note(missing[job_id], f"{otherwise}: {job}")

    # ------------------------------------------------------------ what the history does not know

    def _tell_again(self, side: QueueSide, findings: Sequence[Finding]) -> None:
        """But for jobs that had ended: an end in the history is not taken back while the job waits to run again."""
        told = [one for one in findings if one.kind is not Kind.QUEUE_WENT_BACK or not self._had_ended(side, one)]
        self._tell_where(side, [_job_id(one) for one in told], has_rows=True)
        for finding in findings:
            self._note(finding, "told again" if finding in told else "left: its end in the history stands")

    def _had_ended(self, side: QueueSide, finding: Finding) -> bool:
        job_id = _job_id(finding)
        known = self._known([job_id]).get(job_id)
        (picture,) = side.pictures([job_id])
        is_open = picture.state is not None and not picture.state.is_terminal
        return known is not None and known.state.is_terminal and is_open

    def _tell_where(self, side: QueueSide, job_ids: Sequence[JobId], *, has_rows: bool = False) -> None:
        """The history takes only versions above its own: jobs that begin anew go on from there."""
        for bite in in_bites(job_ids, limits.MAX_BITE):
            known = self._known(bite)
            rows = [(one, known[one].version if one in known else 0) for one in bite]
            rows = rows if has_rows else [(job_id, version) for job_id, version in rows if version > 1]
            if rows:
                self._run(tell_again(side.keys, rows))

    def _known(self, job_ids: Sequence[JobId]) -> dict[JobId, Any]:
        return {} if self._history is None else self._history.known(job_ids)


def _job_id(finding: Finding) -> JobId:
    assert finding.job_id is not None
    return finding.job_id


def _outcome(answer: SubmitAnswer) -> str:
    match answer:
        case Accepted():
            return "re-added"
        case Duplicate(state=state):
            return f"it is there after all: {state}"
        case Conflict(id=other):
            return f"not re-added: its key belongs to job {other}"
        case Refused(message=message):
            return f"not re-added: {message}"
