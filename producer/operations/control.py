"""Cancel, requeue and delete jobs; pause, purge, configure and identify queues. No I/O."""

import secrets
from collections.abc import Sequence
from typing import cast

from sluice.producer.contract import calls
from sluice.producer.contract.wire import JobId
from sluice.producer.errors import JobNotFound
from sluice.producer.operations.operation import Ask, Operation
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import ask_call, ask_calls, for_jobs


def cancel(queue: Queue, job_ids: Sequence[JobId], reason: str | None) -> Operation[list[str]]:
    """Cancel jobs; returns for each the state reached, `asked` for a running job, or `unknown`."""
    return (yield from for_jobs(queue, job_ids, lambda keys, ids: calls.cancel(keys, ids, reason=reason)))


def known(answer: str, job_id: JobId) -> str:
    """Return the result of a cancel.

    Raises:
        JobNotFound: the job is unknown.
    """
    if answer == "unknown":
        raise JobNotFound(job_id)
    return answer


def requeue(queue: Queue, job_ids: Sequence[JobId]) -> Operation[list[bool]]:
    """Requeue failed jobs; False for a job that has not failed, or cannot run again."""
    return (yield from for_jobs(queue, job_ids, calls.requeue, is_repeatable=False))


def delete(queue: Queue, job_ids: Sequence[JobId]) -> Operation[list[bool]]:
    """Delete the data of ended jobs; False for a job that has not ended."""
    return (yield from for_jobs(queue, job_ids, calls.delete, is_repeatable=False))


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
    """Return the id of the data that hold the queue: drawn by the first that asks, and lost with the data."""
    key = queue.keys(0).key("server")
    [known] = yield Ask((("GET", key),))  # reads first: a full server refuses every SETNX
    if known is None:
        _, known = yield Ask((("SETNX", key, secrets.token_hex(8)), ("GET", key)))
    return cast("bytes", known).decode(errors="replace")
