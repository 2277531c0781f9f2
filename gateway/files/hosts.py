"""The storages that the gateways and tasks of a queue use: one marker each in Redis, which expires after a minute.

A folder serves one host. With markers of two storages, one process lacks the files of another, and no gateway of
the queue is ready. Another key marks that a callbacks process serves the queue: without one, batches make no progress.
"""

import asyncio
from contextlib import suppress
from typing import cast

from sluice.gateway.errors import SERVER, HttpError
from sluice.gateway.essential import essential_task
from sluice.gateway.faults import StorageUnavailable
from sluice.gateway.files.storage import Storage
from sluice.gateway.queues import QueueClients, Queues
from sluice.gateway.threads import IDENTITY
from sluice.producer.errors import ProducerError, QueueUnreachable
from sluice.producer.operations.operation import Ask, Operation
from sluice.protocol.clock import wall_ms
from sluice.protocol.keys import QueueKeys

LIFE_MS = 60_000
MARK_EVERY_S = 10.0


def mark(queue: str, identity: str) -> Operation[set[str]]:
    """Mark a storage as in use; return all storages in use."""
    key, now = QueueKeys(queue).key("storages"), wall_ms()
    replies = yield Ask(
        (
            ("ZADD", key, now, identity),
            ("ZREMRANGEBYSCORE", key, "-inf", now - LIFE_MS),
            ("PEXPIRE", key, LIFE_MS),
            ("ZRANGE", key, 0, -1),
        )
    )
    return {name.decode() for name in cast("list[bytes]", replies[-1])}


def mark_callbacks(queue: str) -> Operation[None]:
    """Mark that a callbacks process serves a queue."""
    yield Ask((("SET", _callbacks_key(queue), wall_ms(), "PX", LIFE_MS),))


async def lacks_callbacks(queue: QueueClients) -> bool:
    """Return whether no callbacks process has served a queue for a minute; False if this is unknown."""
    try:
        return await queue.submitting.run(_has_no_callbacks(queue.name))
    except ProducerError:
        return False


def without_callbacks(queue: str) -> str:
    """Return the warning for a queue that lacks a callbacks process."""
    return f"batches wait: no `worker callbacks` has served queue {queue!r} for a minute. Start one with its settings"


def _has_no_callbacks(queue: str) -> Operation[bool]:
    [num_keys] = yield Ask((("EXISTS", _callbacks_key(queue)),))
    return num_keys == 0


def _callbacks_key(queue: str) -> str:
    return QueueKeys(queue).key("storages", "callbacks")


async def _marked(queue: QueueClients, identity: str) -> set[str]:
    try:
        return await queue.submitting.run(mark(queue.name, identity))
    except QueueUnreachable:
        return set()  # perhaps only the shard with the markers is away


class StorageMarks:
    """The markers of one gateway, renewed every `MARK_EVERY_S` between `start` and `stop`."""

    def __init__(self, queues: Queues, storage: Storage) -> None:
        self._queues, self._storage = queues, storage
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to write the markers."""
        self._task = essential_task(self._run(), "storage marks")

    async def stop(self) -> None:
        """Stop writing the markers."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def check(self) -> None:
        """Check that all processes of each queue use this storage.

        Raises:
            HttpError: 503, a process uses another storage.
        """
        try:
            identity = await IDENTITY.run(self._storage.identity)
        except StorageUnavailable:
            return  # requests for files report this; all others can be served
        for queue in self._queues:
            if len(await _marked(queue, identity)) > 1:
                raise HttpError(
                    503,
                    SERVER,
                    f"processes of queue {queue.name!r} keep files in different places: give all the same "
                    "SLUICE_FILES_URL, which must not be a folder if they run on several hosts",
                    "several_storages",
                )

    async def _run(self) -> None:
        while True:
            with suppress(ProducerError, HttpError):
                await self.check()
            await asyncio.sleep(MARK_EVERY_S)
