"""Functions that rq workers run: webhooks, exports and retention. Arguments are JSON. Never imports torch.

Secrets must not be stored in Redis as arguments of a job, so each rq worker process calls `bind` with its settings
before it starts to work.
"""

import time
from contextvars import ContextVar
from pathlib import Path

from rq import Retry, get_current_job
from sqlalchemy.engine import Engine

from sluice.history.database import opened_database
from sluice.history.export import BatchJobs, export_batch, num_ended
from sluice.history.retention import erase_prompts_before, forget_before
from sluice.protocol.clock import wall_ms
from sluice.worker.callbacks.events import owner_of
from sluice.worker.callbacks.sender_slots import SenderSlots
from sluice.worker.callbacks.settings import CallbackSettings
from sluice.worker.callbacks.webhooks import WebhookRefused
from sluice.worker.clock import monotonic_s
from sluice.worker.log import get_log

DAY_MS = 86_400_000
LOOK_EVERY_S = 0.2
LONGEST_DELIVERY_S = 60
MAX_PUT_OFF_S = 15
"""Longest time between two looks for a free slot."""

_ALWAYS = 2**31
"""A postponed webhook has not failed; it is postponed as often as necessary."""


_settings: ContextVar[CallbackSettings] = ContextVar("chore settings")

REFUSED_KEPT_S = 86_400
"""How long rq keeps a webhook that was refused, and does not enqueue it again. It is in the log, and takes 5 KB."""


def bind(settings: CallbackSettings) -> None:
    """Set the settings of this process's chores."""
    _settings.set(settings)


def deliver_webhook(url: str, event_id: str, body: str) -> str | Retry:
    """Send one event to one URL, or put it off while the tenant's slots are in use. rq retries if this raises.

    Raises:
        WebhookFailed: the receiver did not accept it.
        WebhookRefused: no retry can help. rq keeps the failed job and does not retry it.
    """
    job = get_current_job()
    if job is None:
        return _deliver(url, event_id, body)
    slots = SenderSlots(job.connection, body, limit=_settings.get().slots, held_s=job.timeout or LONGEST_DELIVERY_S)
    if not slots.take(event_id):
        return Retry(max=_ALWAYS, interval=min(MAX_PUT_OFF_S, 1 + (job.number_of_retries or 0)))
    try:
        return _deliver(url, event_id, body)
    finally:
        slots.leave(event_id)


def _deliver(url: str, event_id: str, body: str) -> str:
    sender = _settings.get().sender
    assert sender is not None, "webhooks are queued only where a secret is set"
    log = get_log(event_id=event_id)
    try:
        status = sender.of_tenant(owner_of(body)[1]).send(url, event_id, body.encode())
    except WebhookRefused as error:
        _try_no_more()
        log.warning("webhook refused", error=str(error))
        raise
    log.info("webhook delivered", status=status)
    return f"delivered: {status}"


class HistoryBehind(Exception):
    """The recorder has not written all ends of a batch yet. rq retries later."""


def export(queue: str, batch: str, folder: str, total: int, began_ms: int | None = None) -> dict[str, object]:
    """Write a batch as JSON lines into the export folder, once the history has all of its ends (`history.export`).

    The last try writes what the history has. Jobs from before `began_ms` belong to an earlier batch of that name.

    Raises:
        ValueError: `folder` is not the export folder.
        HistoryBehind: the history lacks the ends of some of the `total` jobs.
    """
    if folder != _settings.get().export_folder:
        raise ValueError("the export's folder is not SLUICE_EXPORT_FOLDER")
    log, jobs = get_log(batch=batch), BatchJobs(queue, batch, began_ms)
    with opened_database(_settings.get().database_url) as engine:
        num_ended_jobs = _wait_for_ends(engine, jobs, total)
        if num_ended_jobs < total and not _is_last_try():
            raise HistoryBehind(f"the history has {num_ended_jobs} of the {total} ends of batch {batch}")
        written = export_batch(engine, jobs, Path(folder))
    if num_ended_jobs < total:
        log.warning("batch exported incompletely", found=num_ended_jobs, total=total)
    log.info("batch exported", done=written.num_done, failed=written.num_failed)
    return {
        "output": str(written.output_path),
        "errors": str(written.error_path),
        "done": written.num_done,
        "failed": written.num_failed,
        "open": written.num_open,
    }


def retain(days: float | None, prompt_days: float | None) -> dict[str, int]:
    """Delete the queue's jobs that ended over `days` ago, and prompts of those that ended over `prompt_days` ago."""
    settings, now_ms = _settings.get(), wall_ms()
    deleted = erased = 0
    with opened_database(settings.database_url, is_writer=True) as engine:
        if days is not None:
            deleted = forget_before(engine, settings.queue, now_ms - int(days * DAY_MS))
        if prompt_days is not None:
            erased = erase_prompts_before(engine, settings.queue, now_ms - int(prompt_days * DAY_MS))
    if deleted or erased:
        get_log().info("retention applied", jobs_deleted=deleted, prompts_erased=erased)
    return {"jobs_deleted": deleted, "prompts_erased": erased}


def _wait_for_ends(engine: Engine, jobs: BatchJobs, total: int) -> int:
    """Wait briefly for the recorder, and return the number of ends in the history."""
    until_s = monotonic_s() + _settings.get().export_patience_s
    while (number := num_ended(engine, jobs)) < total and monotonic_s() < until_s:
        time.sleep(LOOK_EVERY_S)
    return number


def _is_last_try() -> bool:
    job = get_current_job()
    return job is None or not job.retries_left


def _try_no_more() -> None:
    job = get_current_job()
    if job is not None:
        job.retries_left = 0
        job.failure_ttl = REFUSED_KEPT_S
