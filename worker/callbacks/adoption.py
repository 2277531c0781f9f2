"""Adopt what an older release left in rq. Its rq queues had one name for all queues and all that they work with.

A job that is adopted twice, or while an older process runs it, is run twice: its receiver drops the second event.
"""

import json
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError
from rq import Queue
from rq.job import Job

from sluice.worker.callbacks.chore_jobs import rq_queue


def adopt(own: Queue, old_name: str, is_ours: Callable[[Job], bool]) -> None:
    """Move jobs from the rq queue of an older release, also those that wait for another try."""
    old: Any = rq_queue(old_name, own.connection)  # Any: partly untyped
    for job_id in [*old.get_job_ids(), *old.scheduled_job_registry.get_job_ids()]:
        job = _readable(old, job_id)
        if job is not None and is_ours(job):
            # Into the new one first, so that a crash loses none.
            own.enqueue_job(job)
            old.remove(job_id)
            old.scheduled_job_registry.remove(job_id)


def is_webhook_of(queue: str, job: Job) -> bool:
    """Tell whether a job is the webhook of an event of this queue."""
    match _call(job):
        case "deliver_webhook", [_, _, str(body)]:
            return _queue_in(body) == queue
        case _:
            return False


def is_export_of(queue: str, folder: str | None, job: Job) -> bool:
    """Tell whether a job is the export of a batch of this queue into this folder."""
    match _call(job):
        case "export", [name, _, path, *_]:
            return (name, path) == (queue, folder)
        case _:
            return False


def _readable(queue: Queue, job_id: str) -> Job | None:
    try:
        job = queue.fetch_job(job_id)
        if job is not None:
            _call(job)
    except (RedisError, OSError):
        raise
    except Exception:  # noqa: BLE001  # any program may have written it
        return None
    return job


def _call(job: Job) -> tuple[str, list[Any]]:  # Any: JSON
    known: Any = job  # Any: as above
    return str(known.func_name).rpartition(".")[2], list(known.args)


def _queue_in(body: str) -> object:
    try:
        return json.loads(body)["data"]["queue"]
    except (ValueError, KeyError, TypeError):
        return None
