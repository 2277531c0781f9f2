"""Read the state of jobs and queues. No I/O."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

from sluice.producer.errors import AccessDenied, JobNotFound
from sluice.producer.operations.chains import waits_for, with_blocked
from sluice.producer.operations.operation import Ask, Operation
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import for_jobs
from sluice.producer.operations.surveys import WAIT_FIELDS, survey_all, survey_one
from sluice.protocol import calls
from sluice.protocol.calls import JobView, PartitionView, QueueView, TenantLimit
from sluice.protocol.durability import LOOK, persistence_in
from sluice.protocol.keys import FORMAT, QueueKeys, served_partitions
from sluice.protocol.limits import STARTING, STARTING_LIFE_MS
from sluice.protocol.states import JobState
from sluice.protocol.waits import WaitCause, WaitReason
from sluice.protocol.wire import JobId
from sluice.protocol.workers import AWAY_STATES, LOADING


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus(JobView):
    """The state of one job, and an estimate of when it starts."""

    starts_in_s: float | None = None
    """Tokens ahead on its lane divided by the rate that the workers report.

    None if unknown. Unknown also if nothing is ahead, because it depends on when a running job ends.
    """

    waits_for: str | None = None
    """The reason for which a queued or blocked job waits, and what to do; None if unknown."""


def views(queue: Queue, job_ids: Sequence[JobId]) -> Operation[list[JobView | None]]:
    """Read the state of jobs; None for an unknown job."""
    found = yield from for_jobs(queue, job_ids, calls.status)
    return (yield from with_blocked(queue, job_ids, found))


def status(queue: Queue, job_id: JobId) -> Operation[JobStatus]:
    """Read the state of one job.

    Raises:
        JobNotFound: the job is unknown.
    """
    [view] = yield from views(queue, [job_id])
    if view is None:
        raise JobNotFound(job_id)
    if view.state is JobState.BLOCKED:
        return replace(status_of(queue, view, None), waits_for=(yield from waits_for(queue, job_id)))
    if view.state is not JobState.QUEUED:
        return status_of(queue, view, None)
    try:
        return status_of(queue, view, (yield from survey_one(queue.keys_of(job_id), fields=WAIT_FIELDS)))
    except AccessDenied:
        return status_of(queue, view, None)  # a user who is limited to one tenant cannot read the whole queue


def status_of(queue: Queue, view: JobView, survey: QueueView | None) -> JobStatus:
    """Return the state of a job, with an estimate of its start if its partition's survey is given."""
    facts = {name: getattr(view, name) for name in JobView.__dataclass_fields__}
    if survey is None or view.state is not JobState.QUEUED:
        return JobStatus(**facts)
    reason = wait_reason(queue, view, survey)
    return JobStatus(**facts, starts_in_s=_starts_in_s(view, survey), waits_for=reason.message)


def _starts_in_s(view: JobView, queue: QueueView) -> float | None:
    return view.ahead_tokens / queue.tokens_per_s if view.ahead_tokens and queue.tokens_per_s else None


def explain(queue: Queue, view: JobView) -> Operation[WaitReason]:
    """Look up the reason for which an unfinished job waits."""
    if view.state is JobState.BLOCKED:
        return WaitReason(WaitCause.BLOCKED, (yield from waits_for(queue, view.id)))
    persistence = persistence_in((yield Ask(LOOK, is_lenient=True)))
    if persistence is not None and persistence.is_append_failing:
        how = "Free space on its disk; waiting jobs then continue by themselves"
        return WaitReason(WaitCause.SERVER_CANNOT_WRITE, f"the server cannot write its append-only file. {how}")
    try:
        return wait_reason(queue, view, (yield from survey_one(queue.keys_of(view.id), fields=WAIT_FIELDS)))
    except AccessDenied:
        return WaitReason(WaitCause.BEHIND_OTHERS, f"job {view.id} is {view.state}; this user may not read the queue")


def wait_reason(queue: Queue, view: JobView, survey: QueueView) -> WaitReason:
    """Return the reason for which an unfinished job waits."""
    if view.state is JobState.RUNNING:
        return WaitReason(WaitCause.RUNNING, f"job {view.id} is running (attempt {view.attempt}) and has no new token")
    if survey.is_paused:
        how = f"Resume it: producer queues resume --queue {queue.name}"
        return WaitReason(WaitCause.QUEUE_PAUSED, f"queue {queue.name!r} is paused. {how}")
    if not survey.workers:
        return _without_workers(queue, survey)
    states = {about.get("state") for about in survey.workers.values()}
    if states <= AWAY_STATES:
        return _without_turn(queue, states)
    if states == {"quiet"}:
        how = "Send them SIGCONT, or start another"
        return WaitReason(WaitCause.WORKERS_QUIET, f"the workers of queue {queue.name!r} take no more jobs. {how}")
    return _behind(view, survey)


def _behind(view: JobView, survey: QueueView) -> WaitReason:
    """Return the reason for which a job waits while workers take jobs."""
    if view.ahead_jobs is None:
        return WaitReason(WaitCause.NOT_YET, f"job {view.id} waits until its not_before or its next retry")
    if view.limit is not None:
        return WaitReason(WaitCause.TENANT_AT_LIMIT, f"job {view.id} waits: {at_limit(view.limit)}")
    if not view.ahead_jobs:
        how = "it starts when a worker has room for it"
        return WaitReason(WaitCause.BEHIND_OTHERS, f"no job of its tenant and class is ahead of job {view.id}; {how}")
    work_s = _starts_in_s(view, survey)
    work = "" if work_s is None else f", about {work_s:.0f} s of work"
    return WaitReason(WaitCause.BEHIND_OTHERS, f"{view.ahead_jobs} jobs are ahead of job {view.id}{work}")


def at_limit(limit: TenantLimit) -> str:
    """Return a clause that says which limit a tenant is at."""
    if limit.max_running is not None and (limit.running or 0) >= limit.max_running:
        return f"tenant {limit.tenant} runs {limit.running} jobs and may run {limit.max_running}"
    when = "" if limit.free_in_ms is None else f"; the next may start in {max(0.1, limit.free_in_ms / 1000):.1f} s"
    return f"tenant {limit.tenant} has taken its {limit.tokens_per_minute} tokens a minute{when}"


def _without_turn(queue: Queue, states: Collection[str | None]) -> WaitReason:
    if LOADING in states:
        return WaitReason(WaitCause.MODEL_LOADING, f"the model of queue {queue.name!r} is loaded for its turn")
    return WaitReason(
        WaitCause.WAITS_FOR_TURN,
        f"the model of queue {queue.name!r} waits for its turn on a device that it shares with others",
    )


def _without_workers(queue: Queue, survey: QueueView) -> WaitReason:
    since_ms, _, host = survey.settings.get(STARTING, "0 ").partition(" ")
    if since_ms.isdigit() and survey.server_ms - int(since_ms) < STARTING_LIFE_MS:
        return WaitReason(WaitCause.MODEL_LOADING, f"a worker of queue {queue.name!r} loads its model, on {host}")
    how = f"Start one on the same server: worker start --queue {queue.name}"
    return WaitReason(WaitCause.NO_WORKER, f"no worker serves queue {queue.name!r}. {how}")


def inspect(queue: Queue) -> Operation[list[QueueView]]:
    """Read the state of every partition, with its workers and lanes."""
    return (yield from survey_all((yield from queue.all_keys())))


def has_been_used(views: Sequence[PartitionView]) -> bool:
    """Return whether a queue has ever had a job or a worker on this server; `views`: its partitions."""
    return any(view.totals or view.num_workers or {"partitions", STARTING} & view.settings.keys() for view in views)


def queue_names() -> Operation[dict[str, int]]:
    """Return every queue on the server and its number of partitions. Scans the whole key space.

    The number is that of the workers; without one, that of the partitions that have had jobs.
    """
    queues: dict[str, int] = {}
    cursor = b"0"
    while True:
        [reply] = yield Ask((("SCAN", cursor, "MATCH", f"{{*:*}}:{FORMAT}:counters", "COUNT", 1000),))
        cursor, names = cast("tuple[bytes, list[bytes]]", reply)
        for name in names:
            queue, _, partition = name.decode()[1:].partition("}")[0].rpartition(":")
            if queue and partition.isdigit():
                queues[queue] = max(queues.get(queue, 0), int(partition) + 1)
        if cursor == b"0":
            break
    stated = [("HGET", QueueKeys(name).key("config"), "partitions") for name in queues]
    replies = (yield Ask(tuple(stated))) if stated else []
    return {
        name: served_partitions(name, reply, None) or num_seen
        for (name, num_seen), reply in zip(queues.items(), replies, strict=True)
    }
