"""The gateway's background tasks, which `worker callbacks` runs with rq. Arguments are JSON; secrets are in settings.

A sweep reads the due work from the database and enqueues it, so no work is lost with rq's Redis.
"""

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import rq
from rq.exceptions import DuplicateJobError
from rq.serializers import JSONSerializer
from rq.timeouts import BaseTimeoutException

from sluice.gateway.batches.taken import Workshop
from sluice.gateway.batches.task import advance
from sluice.gateway.batches.turns import Turns
from sluice.gateway.files.hosts import mark, mark_callbacks
from sluice.gateway.files.leftovers import remove_leftovers, remove_old_files
from sluice.gateway.log.lines import log_event
from sluice.gateway.responses.sweep import sweep_responses
from sluice.producer.client import Producer
from sluice.producer.errors import ProducerError
from sluice.protocol.clock import wall_ms

TASK_TIMEOUT_S = 900
KEPT_S = 60
"""How long rq keeps the result or failure of a task."""

HOUR_S = 3600
DAY_MS = 86_400_000
CONTINUE_S = 10.0
"""How long batches are continued before waiting sweeps have their turn."""

CLEAN_S = 5.0
"""How long old files, and then leftovers, are deleted before batches have their turn."""

LOG = logging.getLogger(__name__)


class Outages:
    """Tasks that fail now, each logged when that begins and when it ends. Changes with each task."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    @contextmanager
    def logged(self, task: str) -> Generator[None]:
        """Log a server's error instead of raising it, because a later task tries again."""
        try:
            yield
        except ProducerError as error:
            if task not in self._failing:
                LOG.warning("The gateway's task %s waits: %s", task, error)
                self._failing.add(task)
        else:
            if task in self._failing:
                LOG.warning("The gateway's task %s continues.", task)
                self._failing.remove(task)

    @contextmanager
    def kept_apart(self, task: str) -> Generator[None]:
        """Log any error, not only a server's: it must not end a run that other tenants share."""
        try:
            with self.logged(task):
                yield
        except BaseTimeoutException:  # rq's, which must end the run
            raise
        except Exception:
            if task not in self._failing:
                LOG.exception("The gateway's task %s failed; it is tried again", task)
                self._failing.add(task)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Settings of tasks that are not in their arguments."""

    redis_url: str = field(repr=False)
    """URL of the queues' server."""

    queue: str
    database_url: str = field(repr=False)
    files_url: str = field(repr=False)
    """Where files are stored."""

    file_retention_days: float | None = None
    """How long files are kept; None: until clients delete them."""

    def workshop(self) -> Workshop:
        """Open the resources of a task.

        Raises:
            HistoryUnavailable, InvalidSetting: a URL is wrong.
        """
        return Workshop.open(self.redis_url, self.database_url, self.files_url)


@dataclass(slots=True, eq=False)
class SweepPlace:
    """Where the next sweep of responses continues. Changes with each sweep."""

    after: str = ""


_settings: ContextVar[TaskSettings] = ContextVar("gateway task settings")
_outages: ContextVar[Outages] = ContextVar("gateway task outages")
_responses: ContextVar[SweepPlace] = ContextVar("gateway responses")
_turns: ContextVar[Turns] = ContextVar("gateway batch turns")


def bind(
    *, redis_url: str, queue: str, database_url: str, files_url: str, file_retention_days: float | None = None
) -> None:
    """Set the settings of this process's tasks."""
    settings = TaskSettings(
        redis_url=redis_url,
        queue=queue,
        database_url=database_url,
        files_url=files_url,
        file_retention_days=file_retention_days,
    )
    _settings.set(settings)
    _outages.set(Outages())
    _responses.set(SweepPlace())
    _turns.set(Turns())


def continue_batches() -> None:
    """Continue due batches for some seconds, with tenants in turn."""
    queue, turns, until_s = _settings.get().queue, _turns.get(), time.monotonic() + CONTINUE_S
    with _outages.get().logged("continue_batches"), _settings.get().workshop() as workshop:
        while time.monotonic() < until_s and (due := turns.next(workshop.batches.due(queue))) is not None:
            with _outages.get().kept_apart(due.id):
                advance(workshop, due.id, due.epoch)


def clean_files(after: str = "", until_s: float = 0) -> None:
    """Delete old files, and objects without a row, for some seconds.

    Args:
        after: Continue after this object's key.
        until_s: Until this wall-clock time, the rest is enqueued as another task; later, it is left to the next hour's.
    """
    with _outages.get().logged("clean_files"), _settings.get().workshop() as workshop:
        rest = _clean(workshop, after)
        if rest is not None and time.time() < until_s:
            _enqueue(clean_files, rest, until_s, name=f"clean-on-{token_hex(6)}")


def _clean(workshop: Workshop, after: str) -> str | None:
    days = _settings.get().file_retention_days
    if days is not None:
        before_ms = wall_ms() - round(days * DAY_MS)
        cleaned = remove_old_files(workshop.storage, workshop.files, before_ms=before_ms, for_s=CLEAN_S)
        if cleaned.num_deleted:
            log_event(LOG, "Old files deleted", {"num_files": cleaned.num_deleted, "days": days})
        if not cleaned.is_over:
            return after
    return remove_leftovers(workshop.storage, workshop.files, workshop.batches, after=after, for_s=CLEAN_S).rest


def _mark_process(settings: TaskSettings) -> None:
    with _queue_of(settings) as queue:
        queue.run(mark_callbacks(settings.queue))


def _mark_storage(settings: TaskSettings) -> None:
    with settings.workshop() as workshop, _queue_of(settings) as queue:
        queue.run(mark(settings.queue, workshop.storage.identity()))


def _queue_of(settings: TaskSettings) -> Producer:
    return Producer(settings.redis_url, queue=settings.queue, patience_s=1.0)


def _enqueue_batches(settings: TaskSettings) -> None:
    with settings.workshop() as workshop:
        if workshop.batches.due(settings.queue):
            # A new id each second, because a task continues the work of others, and rq can lose one whose id it has.
            _enqueue(continue_batches, name=f"continue-{int(time.time())}")


def _clean_hourly(_settings: TaskSettings) -> None:
    hour = int(time.time()) // HOUR_S
    _enqueue(clean_files, "", (hour + 1) * HOUR_S, name=f"clean-{hour}", kept_s=HOUR_S)


def _sweep_responses(settings: TaskSettings) -> None:
    place = _responses.get()
    place.after = sweep_responses(settings.redis_url, settings.queue, settings.database_url, after=place.after)


STEPS: tuple[Callable[[TaskSettings], None], ...] = (
    _mark_process,  # first, and without the storage: gateways warn while the mark is missing
    _enqueue_batches,
    _sweep_responses,
    _mark_storage,
    _clean_hourly,
)
"""The steps of a sweep, in order. Each is short and idempotent."""


def sweep() -> None:
    """Start the due work; called every few seconds.

    Raises:
        ExceptionGroup: some steps failed; the others are done.
    """
    errors: list[Exception] = []
    for step in STEPS:
        try:
            with _outages.get().logged(step.__name__):
                step(_settings.get())
        except Exception as error:  # noqa: BLE001  # one step must not keep the others from theirs
            errors.append(error)
    if errors:
        raise ExceptionGroup("steps of a sweep failed", errors)


TASKS: Mapping[str, Callable[..., object]] = {task.__name__: task for task in (sweep, continue_batches, clean_files)}
"""The tasks that rq may call here, by name."""


def _enqueue(task: Callable[..., object], *arguments: object, name: str, kept_s: int = KEPT_S) -> None:
    """Enqueue a task, unless rq has its id, which is the name and the end of the queue's name."""
    job = rq.get_current_job()
    assert job is not None, "sweeps are run by rq"
    queue: Any = rq.Queue(job.origin, connection=job.connection, serializer=JSONSerializer)  # Any: partly untyped
    with suppress(DuplicateJobError):
        queue.enqueue(
            task, args=arguments, job_id=f"{name}-{job.origin.rpartition('-')[2]}", unique=True,
            job_timeout=TASK_TIMEOUT_S, result_ttl=kept_s, failure_ttl=kept_s,
        )  # fmt: skip
