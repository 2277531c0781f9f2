"""What rq's workers run: webhooks, exports, retention. Never imports torch; arguments are JSON.

A secret must not travel through Redis in a job's arguments, so what a chore needs of the settings is bound in the
process that runs it, before it begins to work (`bind`).
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from rq import get_current_job
from sqlalchemy.engine import Engine

from producer.contract.database import open_database
from worker.clock import monotonic_s, wall_ms
from worker.export import export_batch, num_ended
from worker.log import get_log
from worker.retention import erase_prompts_before, forget_before
from worker.webhooks import Sender, WebhookRefused

DAY_MS = 86_400_000
LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoreSettings:
    """What chores need that is not in their arguments."""

    database_url: str
    sender: Sender | None = None
    """None: webhooks are not sent."""

    export_folder: str | None = None
    """The one folder that exports are written to."""

    export_patience_s: float = 5.0
    """How long one try waits for the recorder."""

    def __repr__(self) -> str:
        return f"ChoreSettings(sender={self.sender!r})"


_settings: ContextVar[ChoreSettings] = ContextVar("chore settings")


def bind(settings: ChoreSettings) -> None:
    """Give this process's chores their settings."""
    _settings.set(settings)


def deliver_webhook(url: str, event_id: str, body: str) -> str:
    """Send one event to one URL; rq tries again when this raises.

    Raises:
        WebhookFailed: the receiver did not take it.
        WebhookRefused: no try can help; rq keeps the job with this reason and does not try again.
    """
    sender = _settings.get().sender
    assert sender is not None, "webhooks are queued only where a secret is set"
    log = get_log(event_id=event_id)
    try:
        status = sender.send(url, event_id, body.encode())
    except WebhookRefused as error:
        _try_no_more()
        log.warning("webhook refused", error=str(error))
        raise
    log.info("webhook delivered", status=status)
    return f"delivered: {status}"


class HistoryBehind(Exception):
    """The recorder has not written all of a batch yet: rq tries again later."""


def export(queue: str, batch: str, folder: str, total: int) -> dict[str, object]:
    """Write a batch's JSON lines into the export folder, once the history has all its jobs; see `worker.export`.

    The last try writes what is there.

    Raises:
        ValueError: it is another folder.
        HistoryBehind: the ends of some of the `total` jobs are not in the history yet.
    """
    if folder != _settings.get().export_folder:
        raise ValueError("an export is asked for into another folder than SLUICE_EXPORT_FOLDER")
    log = get_log(batch=batch)
    engine = open_database(_settings.get().database_url)
    try:
        found = _wait_for_ends(engine, queue, batch, total)
        if found < total and not _is_last_try():
            raise HistoryBehind(f"the history has {found} of the {total} ends of batch {batch}")
        written = export_batch(engine, queue, batch, Path(folder))
    finally:
        engine.dispose()
    if found < total:
        log.warning("batch exported without what the history lacks", found=found, total=total)
    log.info("batch exported", done=written.num_done, failed=written.num_failed)
    return {
        "output": str(written.output_path),
        "errors": str(written.error_path),
        "done": written.num_done,
        "failed": written.num_failed,
        "open": written.num_open,
    }


def retain(days: float | None, prompt_days: float | None) -> dict[str, int]:
    """Delete jobs that ended more than `days` ago, and erase prompts of those that ended `prompt_days` ago."""
    engine = open_database(_settings.get().database_url, is_writer=True)
    try:
        deleted = 0 if days is None else forget_before(engine, wall_ms() - int(days * DAY_MS))
        erased = 0 if prompt_days is None else erase_prompts_before(engine, wall_ms() - int(prompt_days * DAY_MS))
    finally:
        engine.dispose()
    if deleted or erased:
        get_log().info("history retained", jobs_deleted=deleted, prompts_erased=erased)
    return {"jobs_deleted": deleted, "prompts_erased": erased}


def _wait_for_ends(engine: Engine, queue: str, batch: str, total: int) -> int:
    """Give the recorder a moment; how many ends the history has then."""
    until_s = monotonic_s() + _settings.get().export_patience_s
    while (found := num_ended(engine, queue, batch)) < total and monotonic_s() < until_s:
        time.sleep(LOOK_EVERY_S)
    return found


def _is_last_try() -> bool:
    job = get_current_job()
    return job is None or not job.retries_left


def _try_no_more() -> None:
    job = get_current_job()
    if job is not None:
        job.retries_left = 0
