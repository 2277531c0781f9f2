"""What rq may run here: the three chores, whatever a job in its Redis asks for.

rq imports and calls the function that a job names, then the callbacks that it names, and posts to the URLs that it
lists. So whoever may write to rq's Redis could run any function of any package. Here only a chore is ever called, from
JSON arguments, and the rest of such a job is forgotten.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rq import Queue, SimpleWorker
from rq.job import Job
from rq.serializers import JSONSerializer

from worker import chores
from worker.connections import Client

CHORES: Mapping[str, Callable[..., object]] = {
    f"{chore.__module__}.{chore.__qualname__}": chore
    for chore in (chores.deliver_webhook, chores.export, chores.retain)
}


class NotAChore(Exception):
    """A job names a function that is none of ours."""


class ChoreJob(Job):
    """A job of rq that can only be one of `CHORES`."""

    @property
    def func(self) -> Callable[..., object]:
        """The chore that it names.

        Raises:
            NotAChore: it names something else.
        """
        chore = None if self.instance is not None else CHORES.get(str(self.func_name))
        if chore is None:
            raise NotAChore(f"{self.func_name!r} is not one of {', '.join(CHORES)}")
        return chore

    def restore(self, raw_data: Any) -> None:  # noqa: ANN401  # rq's own type
        """Read it from Redis, without callbacks and addresses of its own."""
        super().restore(raw_data)  # pyright: ignore[reportUnknownMemberType]
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None
        self.webhooks = []


def rq_queue(name: str, rq_client: Client) -> Queue:
    """One of our two rq queues."""
    return Queue(name, connection=rq_client, serializer=JSONSerializer, job_class=ChoreJob)


def rq_worker(name: str, rq_client: Client) -> SimpleWorker:
    """What runs the jobs of one of them."""
    queue = rq_queue(name, rq_client)
    return SimpleWorker([queue], connection=rq_client, serializer=JSONSerializer, job_class=ChoreJob)
