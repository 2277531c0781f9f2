"""Which partitions of a queue answer: in a Cluster, those of a shard that is away do not, and the others go on."""

import asyncio
from contextlib import suppress
from secrets import token_hex

from sluice.producer.aio import AsyncProducer
from sluice.producer.contract import calls
from sluice.producer.contract.calls import QueueView
from sluice.producer.contract.jobs import Options, partition_of
from sluice.producer.contract.transport.urls import is_cluster
from sluice.producer.contract.wire import JobId
from sluice.producer.errors import QueueUnreachable
from sluice.producer.gateway.settings import ServedQueue
from sluice.producer.operations.durability import DurabilityPolicy
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import ask_call

SURVEY_LIMIT_S = 1.0
"""A partition that takes longer counts as away."""


class Partitions:
    """The partitions of one queue. Changes with each reading of their state.

    Args:
        queue: The queue.
        url: Of its server.
        client: Gives up soon while the server is away.
    """

    def __init__(self, queue: ServedQueue, url: str | None, client: AsyncProducer) -> None:
        self._queue, self._client = Queue(queue.name, queue.partitions), client
        self._answering = list(range(queue.partitions))
        self._eager = _eager(queue, url)

    async def close(self) -> None:
        """Close what it opened."""
        if self._eager is not None:
            await self._eager.close()

    async def surveys(self) -> list[QueueView]:
        """Read the state of the partitions that answer.

        Raises:
            QueueUnreachable: none does.
        """
        if self._eager is None:
            return await self._client.queue()
        found = await asyncio.gather(*(self._survey(self._eager, partition) for partition in self._all))
        if views := [view for view in found if view is not None]:
            self._answering = [partition for partition, view in zip(self._all, found, strict=True) if view is not None]
            return views
        return await self._client.queue()

    async def check(self) -> None:
        """Check that the queue accepts jobs of this number of partitions; not while no server says it.

        Raises:
            InvalidSetting: the workers serve another number, or the queue's durability is wrong.
            DurabilityRefused: the server cannot guarantee that durability.
        """
        with suppress(QueueUnreachable):
            await (self._eager or self._client).run(DurabilityPolicy().resolve(self._queue, None))

    def choose(self, name: str) -> int:
        """Return the partition of a new job, by the last part of its id: one that answered last."""
        partition = partition_of(name, self._queue.partitions)
        if partition in self._answering:
            return partition
        return self._answering[partition_of(name, len(self._answering))]

    def placed(self, options: Options) -> Options:
        """Return the options of a new job with an id on a partition that answers, if one does not.

        An id or an idempotency key says where the job is: it may be there already.
        """
        is_open = options.get("job_id") is None and options.get("idempotency_key") is None
        if not is_open or len(self._answering) == self._queue.partitions:
            return options
        name = token_hex(12)
        return {**options, "job_id": JobId(f"{self.choose(name)}.{options.get('tenant', 'default')}.{name}")}

    @property
    def _all(self) -> range:
        return range(self._queue.partitions)

    async def _survey(self, client: AsyncProducer, partition: int) -> QueueView | None:
        try:
            async with asyncio.timeout(SURVEY_LIMIT_S):
                return await client.run(ask_call(calls.inspect(self._queue.keys(partition))))
        except (QueueUnreachable, TimeoutError):
            return None


def _eager(queue: ServedQueue, url: str | None) -> AsyncProducer | None:
    """Return a client that does not wait for a shard to return; None if all partitions are on one server."""
    if url is None or not is_cluster(url) or queue.partitions == 1:
        return None
    return AsyncProducer(url, queue=queue.name, partitions=queue.partitions, patience_s=0)
