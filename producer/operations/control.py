"""Cancel, expire, requeue and delete jobs; pause, purge, configure and identify queues. No I/O."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import cast

from sluice.producer.errors import AccessDenied, JobNotFound
from sluice.producer.operations.chains import blocked_jobs, flag_blocked, jobs_of_chain
from sluice.producer.operations.operation import Ask, Operation
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import ask_call, ask_calls, for_jobs, slices_of
from sluice.protocol import calls, limits
from sluice.protocol.calls import JobView
from sluice.protocol.redis.execution import command_of
from sluice.protocol.wire import JobId

UNKNOWN = "unknown"
"""Answer to a cancel for a job that the queue does not have."""

END_EVERY_S = 1.0
"""Time between two attempts of a waiting call to end overdue jobs."""


def cancel(queue: Queue, job_ids: Sequence[JobId], reason: str | None) -> Operation[list[str]]:
    """Cancel jobs; returns for each the state reached, `asked` for a running or blocked job, or `unknown`."""
    states = yield from _cancel(queue, job_ids, reason)
    missing = [job_id for job_id, state in zip(job_ids, states, strict=True) if state == UNKNOWN]
    blocked = (yield from flag_blocked(queue, missing, reason)) if missing else None
    if blocked is None:
        return states
    # Those that are not blocked any more have a row by now; a look cancels those that are released after their flag.
    again = dict(zip(missing, (yield from _cancel(queue, missing, reason)), strict=True))
    asked = {job_id: "asked" if state == UNKNOWN and job_id in blocked else state for job_id, state in again.items()}
    return [asked.get(job_id, state) for job_id, state in zip(job_ids, states, strict=True)]


def cancel_chain(queue: Queue, chain_id: str, reason: str | None) -> Operation[dict[JobId, str]]:
    """Cancel the jobs of a chain; returns for each what `cancel` does.

    Raises:
        ChainNotFound: it has no blocked jobs.
    """
    ids = yield from jobs_of_chain(queue, chain_id)
    return dict(zip(ids, (yield from cancel(queue, ids, reason)), strict=True))


def _cancel(queue: Queue, job_ids: Sequence[JobId], reason: str | None) -> Operation[list[str]]:
    answers = dict.fromkeys(job_ids, calls.AGAIN)
    while left := [job_id for job_id, answer in answers.items() if answer == calls.AGAIN]:
        states = yield from for_jobs(queue, left, lambda keys, ids: calls.cancel(keys, ids, reason=reason))
        answers.update(zip(left, states, strict=True))
    return [answers[job_id] for job_id in job_ids]


def known(answer: str, job_id: JobId) -> str:
    """Return the result of a cancel.

    Raises:
        JobNotFound: the job is unknown.
    """
    if answer == UNKNOWN:
        raise JobNotFound(job_id)
    return answer


@dataclass(slots=True, eq=False)
class OverdueJobs:
    """The overdue jobs for which one call waits. Changes with each look.

    Deadlines and times to live are timers of the queue, which workers fire. If no worker is alive, a client that waits
    for a job fires them, so that the job ends for all its readers. This also ends a job that was asked to stop and
    whose worker has died since.
    """

    _queue: Queue
    _fire_at_s: float = 0.0
    _may_fire: bool = True

    def end(self, views: Iterable[JobView | None]) -> Operation[float]:
        """End the overdue jobs, or ask their workers to; return the time until the next look, in seconds.

        A user without the right to change all jobs cannot fire timers, and waits until another process does.
        """
        unended = {view.id: view for view in views if view is not None and not view.state.is_terminal}
        overdue = [view.id for view in unended.values() if _is_overdue(view)]
        if overdue and self._may_fire and monotonic() >= self._fire_at_s:
            self._fire_at_s = monotonic() + END_EVERY_S
            yield from self._fire(overdue)
        return min((_left_s(view) for view in unended.values()), default=float("inf"))

    def _fire(self, overdue: list[JobId]) -> Operation[None]:
        slices = slices_of(overdue, limits.SLICE_JOBS)
        firings = [
            calls.maintain(self._queue.keys(partition), overdue=[overdue[i] for i in at]) for partition, at in slices
        ]
        replies = yield Ask(tuple(map(command_of, firings)), is_lenient=True)
        self._may_fire = not any(isinstance(reply, AccessDenied) for reply in replies)


def _is_overdue(view: JobView) -> bool:
    return view.asked is not None or (view.expires_in_ms is not None and view.expires_in_ms <= 0)


def _left_s(view: JobView) -> float:
    if _is_overdue(view):
        return END_EVERY_S
    return float("inf") if view.expires_in_ms is None else view.expires_in_ms / 1000


def requeue(queue: Queue, job_ids: Sequence[JobId]) -> Operation[list[bool]]:
    """Requeue failed jobs; returns False for a job that has not failed or cannot run again."""
    return (yield from for_jobs(queue, job_ids, calls.requeue, is_repeatable=False))


def delete(queue: Queue, job_ids: Sequence[JobId]) -> Operation[list[bool]]:
    """Delete the data of ended jobs; returns False for a job that has not ended."""
    deleted = yield from for_jobs(queue, job_ids, calls.delete, is_repeatable=False)
    blocked = (yield from blocked_jobs(queue, job_ids)) or {}
    return [is_gone and job_id not in blocked for job_id, is_gone in zip(job_ids, deleted, strict=True)]


def pause(queue: Queue, *, is_paused: bool) -> Operation[None]:
    """Pause or resume a queue."""
    yield from ask_calls([calls.pause(keys, is_paused=is_paused) for keys in (yield from queue.all_keys())])


def purge(queue: Queue, tenant: str | None) -> Operation[int]:
    """Cancel every waiting job (of one tenant), in slices; returns how many."""
    total = 0
    for keys in (yield from queue.all_keys()):
        has_more = True
        while has_more:
            num_jobs, has_more = yield from ask_call(calls.purge(keys, tenant=tenant))
            total += num_jobs
    return total


def configure(queue: Queue, settings: calls.QueueSettings) -> Operation[None]:
    """Write the settings of a queue."""
    yield from ask_calls([calls.configure(keys, settings) for keys in (yield from queue.all_keys())])
    queue.forget()


def server_id(queue: Queue) -> Operation[str]:
    """Return the id of the server's data set: random, created by the first call, and lost with the data."""
    key = queue.keys(0).key("server")
    [server] = yield Ask((("GET", key),))  # read first, because a full server refuses every SETNX
    if server is None:
        _, server = yield Ask((("SETNX", key, secrets.token_hex(8)), ("GET", key)))
    return cast("bytes", server).decode(errors="replace")
