"""The dead set: find the jobs that failed for good, and requeue them. No I/O."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from sluice.producer.operations.control import requeue
from sluice.producer.operations.operation import Ask, Operation, Reply
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import SLICES_PER_TRIP, for_jobs
from sluice.producer.operations.views import inspect
from sluice.protocol import calls, limits
from sluice.protocol.calls import JobView
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.keys import QueueKeys
from sluice.protocol.wire import JobId

DEAD_PER_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadFilter:
    """A selection of dead jobs; None means any."""

    error_code: str | None = None
    tenant: str | None = None
    batch: str | None = None
    min_age_s: float | None = None
    """Least time since the failure."""

    max_age_s: float | None = None

    def matches(self, view: JobView, age_s: float) -> bool:
        """Return whether the filter selects a job that failed `age_s` ago."""
        conditions = (
            (self.error_code, view.error_code),
            (self.tenant, split_job_id(view.id)[1]),
            (self.batch, view.batch),
        )
        is_old = self.min_age_s is None or age_s >= self.min_age_s
        is_new = self.max_age_s is None or age_s <= self.max_age_s
        return is_old and is_new and all(value in (None, actual) for value, actual in conditions)


def dead_jobs(queue: Queue, selection: DeadFilter) -> Operation[list[JobView]]:
    """Return the selected dead jobs, oldest failure first. Changes nothing."""
    dead: list[JobView] = []
    for partition, survey in enumerate((yield from inspect(queue))):
        keys = queue.keys(partition)
        # An id contains the tenant, so the jobs of other tenants need not be read.
        ids = [job_id for job_id in (yield from _dead_ids(keys)) if selection.tenant in (None, split_job_id(job_id)[1])]
        views = yield from for_jobs(queue, ids, calls.status)
        # A job that was requeued in the meantime has no end.
        ended = [view for view in views if view is not None and view.ended_ms is not None]
        dead += [view for view in ended if selection.matches(view, (survey.server_ms - (view.ended_ms or 0)) / 1000)]
    return dead


def _dead_ids(keys: QueueKeys) -> Operation[list[JobId]]:
    """Return all members of the set, paged by score, because jobs may be added and removed meanwhile."""
    times: dict[JobId, str] = {}
    since, num_same = "-inf", 0
    while True:
        page = ("ZRANGEBYSCORE", keys.key("dead"), since, "+inf", "WITHSCORES", "LIMIT", num_same, DEAD_PER_PAGE)
        [reply] = yield Ask((page,))
        pairs = list(_pairs(reply))
        times.update(pairs)
        if len(pairs) < DEAD_PER_PAGE:
            return list(times)
        since = pairs[-1][1]
        num_same = Counter(times.values())[since]


def _pairs(reply: Reply) -> Iterator[tuple[JobId, str]]:
    """Yield (job, score) from a ZRANGEBYSCORE WITHSCORES, as RESP2 or RESP3 returns it."""
    for row in _rows(cast("Sequence[object]", reply)):
        name, score = cast("tuple[bytes, bytes | float]", row)
        yield JobId(name.decode()), score.decode() if isinstance(score, bytes) else repr(score)


def _rows(reply: Sequence[object]) -> Iterator[object]:
    if reply and isinstance(reply[0], (list, tuple)):
        yield from reply
    else:
        yield from zip(reply[::2], reply[1::2], strict=True)


def requeue_dead(queue: Queue, selection: DeadFilter) -> Operation[int]:
    """Requeue the selected dead jobs; returns how many were requeued."""
    ids = [view.id for view in (yield from dead_jobs(queue, selection))]
    total, step = 0, SLICES_PER_TRIP * limits.SLICE_JOBS
    for at in range(0, len(ids), step):
        total += sum((yield from requeue(queue, ids[at : at + step])))
    return total
