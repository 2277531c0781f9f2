"""Wait for the ends of many jobs, without I/O: the same generators as `commands.py`, which also yield outcomes."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TypeAlias, cast

from producer.commands import Ask, Pause, Queue, Reply, outcome, views
from producer.contract.calls import JobView
from producer.contract.wire import JobId, JobResult
from producer.errors import JobNotFound, ProducerError

MAX_WATCHED = 2048
"""Jobs asked about in one round; the oldest first, since they end first."""

MIN_PAUSE_S = 0.005
MAX_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one job ended."""

    job_id: JobId
    view: JobView | None
    """Its times and counts; None where the queue no longer knows it."""

    result: JobResult | None
    """Its output, whole when `error` is None."""

    error: ProducerError | None
    """JobFailed, JobCancelled, JobExpired, ResultExpired or JobNotFound."""

    entries: tuple[bytes, ...] = ()


Outcomes: TypeAlias = Generator[Ask | Pause | Outcome, list[Reply], None]


def outcomes(queue: Queue, job_ids: Iterable[JobId]) -> Outcomes:
    """Yield the outcome of each job, as they end; looks less often while none does."""
    watched = list(job_ids)
    pause_s = MIN_PAUSE_S
    while watched:
        now = watched[:MAX_WATCHED]
        found = yield from views(queue, now)
        ended = {
            job_id: view for job_id, view in zip(now, found, strict=True) if view is None or view.state.is_terminal
        }
        yield from _ended(queue, ended)
        watched = [job_id for job_id in now if job_id not in ended] + watched[MAX_WATCHED:]
        pause_s = MIN_PAUSE_S if ended else min(pause_s * 1.5, MAX_PAUSE_S)
        if watched:
            yield Pause(pause_s)


def _ended(queue: Queue, ended: dict[JobId, JobView | None]) -> Outcomes:
    if not ended:
        return
    replies = yield Ask(tuple(("GET", queue.keys_of(job_id).result(job_id)) for job_id in ended))
    for (job_id, view), data in zip(ended.items(), replies, strict=True):
        yield _outcome(job_id, view, cast("bytes | None", data))


def _outcome(job_id: JobId, view: JobView | None, data: bytes | None) -> Outcome:
    if view is None:
        return Outcome(job_id=job_id, view=None, result=None, error=JobNotFound(job_id))
    try:
        return Outcome(job_id=job_id, view=view, result=outcome(view, data), error=None)
    except ProducerError as error:
        return Outcome(job_id=job_id, view=view, result=getattr(error, "partial", None), error=error)
