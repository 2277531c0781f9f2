"""Which partitions of a queue answer: in a Cluster, those of a shard that is away do not, and the others go on."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from secrets import token_hex

from sluice.producer.aio import AsyncProducer
from sluice.producer.errors import QueueUnreachable
from sluice.producer.operations.durability import DurabilityPolicy
from sluice.producer.operations.operation import Operation, Result
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import ask_calls
from sluice.producer.operations.surveys import survey_all
from sluice.protocol import calls
from sluice.protocol.calls import QueueView
from sluice.protocol.jobs import CheckedJob, partition_of
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.urls import is_cluster
from sluice.protocol.scaling.backlog import BACKLOG_FIELDS
from sluice.protocol.wire import JobId

SURVEY_LIMIT_S = 1.0
"""A partition that takes longer counts as away."""


class Partitions:
    """The partitions of one queue. Changes with each reading of their state.

    Args:
        url: Of its server.
        client: Of the queue. Gives up soon while the server is away.
    """

    def __init__(self, url: str | None, client: AsyncProducer) -> None:
        self._queue, self._client = client.target, client
        self._away: frozenset[int] = frozenset()
        self._durability = DurabilityPolicy()
        self._eager = _eager(self._queue, url)

    async def close(self) -> None:
        """Close what it opened."""
        if self._eager is not None:
            await self._eager.close()

    async def surveys(self, *, has_lanes: bool = False) -> list[QueueView]:
        """Read the state of the partitions that answer, and what all workers tell of their capacity.

        `has_lanes`: also what waits for each tenant.

        Raises:
            QueueUnreachable: none does.
            InvalidSetting: the workers serve another number than the settings name.
        """
        return await self._read(lambda keys: survey_all(keys, fields=BACKLOG_FIELDS, has_lanes=has_lanes))

    async def models(self) -> set[str]:
        """Read which models the workers of the partitions that answer serve.

        Raises:
            QueueUnreachable, InvalidSetting: as `surveys`.
        """
        views = await self._read(lambda keys: ask_calls(list(map(calls.inspect, keys))))
        return {model for view in views for model in view.models}

    async def _read(self, read: Callable[[Sequence[QueueKeys]], Operation[list[Result]]]) -> list[Result]:
        if self._eager is None:
            return await self._client.run(_of_all(self._queue, read))
        asked = [read([self._queue.keys(partition)]) for partition in range(self._queue.partitions)]
        answers = asyncio.gather(*(_answer(self._eager, operation) for operation in asked))
        _, found = await asyncio.gather(_answer(self._eager, self._queue.read()), answers)
        if answered := [one for ones in found for one in ones or ()]:
            self._away = frozenset(partition for partition, ones in enumerate(found) if ones is None)
            return answered
        return await self._client.run(_of_all(self._queue, read))

    async def check(self) -> None:
        """Check that the queue accepts jobs of this number of partitions; not while no server says it.

        What the servers said is cached for some seconds, as for submits.

        Raises:
            InvalidSetting: the workers serve another number, or the queue's durability is wrong.
            DurabilityRefused: the server cannot guarantee that durability.
        """
        with suppress(QueueUnreachable):
            await (self._eager or self._client).run(self._durability.resolve(self._queue, None))

    def choose(self, name: str) -> int:
        """Return the partition of a new job, by the last part of its id: one that answered last."""
        answering = [partition for partition in range(self._queue.partitions) if partition not in self._away]
        partition = partition_of(name, self._queue.partitions)
        return answering[partition_of(name, len(answering))] if partition in self._away and answering else partition

    def placed(self, job: CheckedJob) -> CheckedJob:
        """Return a new job with an id on a partition that answers, if one does not.

        An id or an idempotency key says where the job is: it may be there already.
        """
        if not self._away or not job.is_open:
            return job
        name = token_hex(12)
        return job.with_id(JobId(f"{self.choose(name)}.{job.template.tenant}.{name}"))


def _of_all(queue: Queue, read: Callable[[Sequence[QueueKeys]], Operation[list[Result]]]) -> Operation[list[Result]]:
    return (yield from read((yield from queue.all_keys())))


async def _answer(client: AsyncProducer, operation: Operation[Result]) -> Result | None:
    try:
        async with asyncio.timeout(SURVEY_LIMIT_S):
            return await client.run(operation)
    except (QueueUnreachable, TimeoutError):
        return None


def _eager(queue: Queue, url: str | None) -> AsyncProducer | None:
    """Return a client that does not wait for a shard to return; None if all partitions are on one server."""
    if url is None or not is_cluster(url) or queue.asked_partitions == 1:
        return None
    return AsyncProducer(url, queue=queue.name, partitions=queue.asked_partitions, patience_s=0)
