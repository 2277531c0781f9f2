"""The HTTP gateway's tasks in rq: which there are, the process that runs them, and their periodic sweep.

They are imported where they are used: the gateway's packages need not be installed.
"""

import contextlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rq import Queue
from rq.exceptions import DuplicateJobError

from sluice.protocol.clock import wall_ms
from sluice.worker.callbacks.settings import CallbackSettings, rq_job_id

MODULE = "sluice.gateway.tasks"
SWEEP = f"{MODULE}.sweep"
NEEDS = ("fsspec", "starlette")
"""Packages of the extra `gateway`."""

SWEEP_EVERY_MS = 1000
SWEEP_KEPT_S = 60
"""How long rq remembers a sweep, and refuses its id."""

SWEEP_TIMEOUT_S = 600
MAX_WAITING = 20
"""No sweep is added to more waiting tasks: nothing runs them now."""


def is_installed() -> bool:
    """Return whether the gateway's packages are installed."""
    return all(find_spec(name) is not None for name in NEEDS)


def task_named(name: str) -> Callable[..., object] | None:
    """Return a task of the gateway; None for another name, and without the gateway."""
    if not name.startswith(f"{MODULE}.") or not is_installed():
        return None
    from sluice.gateway.tasks import TASKS

    return TASKS.get(name.removeprefix(f"{MODULE}."))


def bind(settings: CallbackSettings) -> None:
    """Set the settings of the gateway's tasks in this process."""
    from sluice.gateway import tasks

    tasks.bind(
        redis_url=settings.redis_url,
        queue=settings.queue,
        database_url=settings.database_url,
        files_url=settings.files_url,
        file_retention_days=settings.file_retention_days,
    )


class Sweeps:
    """A sweep every second, under an id made of the time: several movers enqueue it once. Changes with each."""

    def __init__(self, queue: Queue) -> None:
        self._queue: Any = queue  # Any: rq is partly untyped
        self._last = -1

    def enqueue_due(self) -> None:
        """Enqueue the sweep of this moment, unless it is known or many tasks wait."""
        moment = wall_ms() // SWEEP_EVERY_MS
        if moment == self._last:
            return
        self._last = moment
        if self._queue.count > MAX_WAITING:
            return
        with contextlib.suppress(DuplicateJobError):
            self._queue.enqueue(
                SWEEP,
                job_id=rq_job_id(f"sweep-{moment}", self._queue.name),
                unique=True,
                job_timeout=SWEEP_TIMEOUT_S,
                result_ttl=SWEEP_KEPT_S,
                failure_ttl=SWEEP_KEPT_S,
            )
