"""Read the state of jobs and queues. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from sluice.producer.contract import calls, limits
from sluice.producer.contract.calls import JobView, QueueView
from sluice.producer.contract.states import JobState
from sluice.producer.contract.wire import JobId
from sluice.producer.errors import AccessDenied, JobNotFound
from sluice.producer.operations.operation import Ask, Operation
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import ask_call, ask_calls, for_jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus(JobView):
    """The state of one job, and an estimate of when it starts."""

    starts_in_s: float | None = None
    """Tokens ahead on its lane divided by the rate that the workers report; None if unknown."""


def views(queue: Queue, job_ids: Sequence[JobId]) -> Operation[list[JobView | None]]:
    """Read the state of jobs; None for an unknown job."""
    return (yield from for_jobs(queue, job_ids, calls.status, slice_jobs=limits.MAX_JOBS_PER_CALL))


def status(queue: Queue, job_id: JobId) -> Operation[JobStatus]:
    """Read the state of one job.

    Raises:
        JobNotFound: the job is unknown.
    """
    [view] = yield from views(queue, [job_id])
    if view is None:
        raise JobNotFound(job_id)
    facts = {name: getattr(view, name) for name in JobView.__dataclass_fields__}
    if view.state is not JobState.QUEUED:
        return JobStatus(**facts)
    try:
        survey = yield from ask_call(calls.inspect(queue.keys_of(job_id)))
    except AccessDenied:
        return JobStatus(**facts)  # a user limited to one tenant cannot read the whole queue
    return JobStatus(**facts, starts_in_s=_starts_in_s(view, survey))


def _starts_in_s(view: JobView, queue: QueueView) -> float | None:
    if view.ahead_tokens is None or not queue.tokens_per_s:
        return None
    return view.ahead_tokens / queue.tokens_per_s


def inspect(queue: Queue) -> Operation[list[QueueView]]:
    """Read the state of every partition."""
    return (yield from ask_calls([calls.inspect(keys) for keys in queue.all_keys()]))


def queue_names() -> Operation[dict[str, int]]:
    """Return every queue on the server and its number of partitions. Scans the whole key space."""
    found: dict[str, int] = {}
    cursor = b"0"
    while True:
        [reply] = yield Ask((("SCAN", cursor, "MATCH", "{*:*}:counters", "COUNT", 1000),))
        cursor, names = cast("tuple[bytes, list[bytes]]", reply)
        for name in names:
            queue, _, partition = name.decode()[1:].partition("}")[0].rpartition(":")
            if queue and partition.isdigit():
                found[queue] = max(found.get(queue, 0), int(partition) + 1)
        if cursor == b"0":
            return found
