"""Acts on many jobs at once, in bites: a whole batch, the dead set. No I/O, as `commands.py`.

A bite is at most 32 jobs, so that no script holds the server for long; a few bites travel in one round trip.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from producer.commands import Ask, Operation, Queue, Reply, ask_calls, batch, for_jobs, known_batch, requeue
from producer.contract import calls, limits
from producer.contract.calls import BatchView, JobView
from producer.contract.keys import QueueKeys
from producer.contract.wire import JobId, split_job_id
from producer.jobs import Moment, moment_ms

BITES_PER_TRIP = 8
DEAD_PER_PAGE = 1000


@dataclass(frozen=True, slots=True)
class BatchCancelled:
    """What a cancel of a batch did."""

    num_ended: int
    """Jobs that waited, and have ended."""

    num_asked: int
    """Jobs that run, and were told to stop."""


def cancel_batch(queue: Queue, name: str, reason: str | None) -> Operation[BatchCancelled]:
    """Close a batch and cancel every job of it that has not ended.

    Raises:
        BatchNotFound: it has no jobs.
    """
    yield from known_batch(queue, name)
    num_ended = num_asked = 0
    for keys in queue.all_keys():
        has_more = True
        while has_more:
            bite = calls.cancel_batch(keys, name, reason=reason)
            answers = yield from ask_calls([bite] * BITES_PER_TRIP)
            num_ended += sum(answer[0] for answer in answers)
            num_asked += sum(answer[1] for answer in answers)
            has_more = answers[-1][2]
    return BatchCancelled(num_ended, num_asked)


def expire_batch(queue: Queue, name: str, deadline: Moment) -> Operation[BatchView]:
    """Give a batch a deadline, in every partition.

    Raises:
        InvalidJob: it is no point in time.
        BatchNotFound: it has no jobs.
    """
    deadline_ms = moment_ms("deadline", deadline) or 0
    yield from known_batch(queue, name)
    yield from ask_calls([calls.expire_batch(keys, name, deadline_ms=deadline_ms) for keys in queue.all_keys()])
    return (yield from batch(queue, name))


# ---------------------------------------------------------------- the dead set


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadFilter:
    """Which dead jobs; None means any."""

    error_code: str | None = None
    tenant: str | None = None
    batch: str | None = None
    min_age_s: float | None = None
    """Failed at least this long ago."""

    max_age_s: float | None = None

    def wants(self, view: JobView, age_s: float) -> bool:
        """Whether a job that failed so long ago is meant."""
        wanted = (
            (self.error_code, view.error_code),
            (self.tenant, split_job_id(view.id)[1]),
            (self.batch, view.batch),
        )
        is_old = self.min_age_s is None or age_s >= self.min_age_s
        is_new = self.max_age_s is None or age_s <= self.max_age_s
        return is_old and is_new and all(value in (None, has) for value, has in wanted)


def dead_jobs(queue: Queue, wanted: DeadFilter) -> Operation[list[JobView]]:
    """The dead jobs that are meant, the one that failed first first. Changes nothing."""
    found: list[JobView] = []
    for survey, keys in zip((yield from _surveys(queue)), queue.all_keys(), strict=True):
        ids = yield from _dead_ids(keys)
        views = yield from for_jobs(queue, ids, calls.status, bite=limits.MAX_JOBS_PER_CALL)
        # One that was requeued meanwhile has no end any more.
        ended = [view for view in views if view is not None and view.ended_ms is not None]
        found += [view for view in ended if wanted.wants(view, (survey.server_ms - (view.ended_ms or 0)) / 1000)]
    return found


def _surveys(queue: Queue) -> Operation[list[calls.QueueView]]:
    return (yield from ask_calls([calls.inspect(keys) for keys in queue.all_keys()]))


def _dead_ids(keys: QueueKeys) -> Operation[list[JobId]]:
    """Every member of the set, in pages by its score: jobs may come and go meanwhile."""
    known: dict[JobId, str] = {}
    since, num_same = "-inf", 0
    while True:
        page = ("ZRANGEBYSCORE", keys.key("dead"), since, "+inf", "WITHSCORES", "LIMIT", num_same, DEAD_PER_PAGE)
        [reply] = yield Ask((page,))
        pairs = list(_pairs(reply))
        known.update(pairs)
        if len(pairs) < DEAD_PER_PAGE:
            return list(known)
        since = pairs[-1][1]
        num_same = Counter(known.values())[since]


def _pairs(reply: Reply) -> Iterator[tuple[JobId, str]]:
    """(job, score) of a ZRANGEBYSCORE with scores, in either protocol's shape."""
    for one in _rows(cast("Sequence[object]", reply)):
        name, score = cast("tuple[bytes, bytes | float]", one)
        yield JobId(name.decode()), score.decode() if isinstance(score, bytes) else repr(score)


def _rows(reply: Sequence[object]) -> Iterator[object]:
    if reply and isinstance(reply[0], (list, tuple)):
        yield from reply
    else:
        yield from zip(reply[::2], reply[1::2], strict=True)


def requeue_dead(queue: Queue, wanted: DeadFilter) -> Operation[int]:
    """Send the dead jobs that are meant back to the queue; how many went."""
    ids = [view.id for view in (yield from dead_jobs(queue, wanted))]
    total, step = 0, BITES_PER_TRIP * limits.MAX_BITE
    for at in range(0, len(ids), step):
        total += sum((yield from requeue(queue, ids[at : at + step])))
    return total
