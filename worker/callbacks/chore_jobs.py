"""rq queues and workers that run chores and nothing else.

rq imports and calls the function and the callbacks that a job names, and posts to the URLs that it lists, so write
access to its Redis is enough to run any function. `ChoreJob` calls chores and the gateway's tasks only, with JSON
arguments, and ignores callbacks and URLs.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from rq import Queue, SimpleWorker
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from sluice.worker.callbacks import chores
from sluice.worker.callbacks.gateway_tasks import task_named
from sluice.worker.connection.clients import Client
from sluice.worker.log import get_log

CHORES: Mapping[str, Callable[..., object]] = {
    f"{chores.__name__}.{chore.__name__}": chore for chore in (chores.deliver_webhook, chores.export, chores.retain)
}

MAX_ERROR_CHARS = 500


class NotAChore(Exception):
    """A job names a function that is not a chore."""


class ChoreJob(Job):
    """An rq job that can only call one of `CHORES`, or a task of the gateway."""

    @property
    def func(self) -> Callable[..., object]:
        """The chore or task that the job names.

        Raises:
            NotAChore: the job names another function.
        """
        chore = None if self.instance is not None else _function_named(str(self.func_name))
        if chore is None:
            raise NotAChore(f"{self.func_name!r} is not one of {', '.join(CHORES)}")
        return chore

    def restore(self, raw_data: Any) -> None:  # noqa: ANN401  # rq's own type
        """Read the job from Redis, without its callbacks and URLs.

        Raises:
            NoSuchJobError: the record is damaged. rq passes over a job that it does not know; any other error would end
                the rq worker.
        """
        try:
            super().restore(raw_data)  # pyright: ignore[reportUnknownMemberType]
            json.dumps(self.meta)  # rq keeps what it cannot read there
        except Exception as error:
            get_log().warning("damaged rq record skipped", rq_job=self.id, error=str(error)[:500])
            raise NoSuchJobError(f"the record of {self.id} is damaged") from error
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None
        self.webhooks = []

    def _handle_failure(self, exc_string: str, *given: Any, **named: Any) -> None:  # noqa: ANN401  # rq's own types
        """Keep the end of an error's text: rq keeps it twice, for days."""
        super()._handle_failure(exc_string[-MAX_ERROR_CHARS:], *given, **named)  # pyright: ignore[reportUnknownMemberType]


def _function_named(name: str) -> Callable[..., object] | None:
    return CHORES.get(name) or task_named(name)


def rq_queue(name: str, rq_client: Client) -> Queue:
    """Open an rq queue for chores."""
    return Queue(name, connection=rq_client, serializer=JSONSerializer, job_class=ChoreJob)


def rq_worker(name: str, rq_client: Client) -> SimpleWorker:
    """Make a worker for the chores of one rq queue."""
    queue = rq_queue(name, rq_client)
    return SimpleWorker([queue], connection=rq_client, serializer=JSONSerializer, job_class=ChoreJob)
