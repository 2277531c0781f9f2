"""Availability of a queue's partitions: in a Cluster, those of an unreachable shard fail, and the others work."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from secrets import token_hex
from typing import NamedTuple

from sluice.producer.aio import AsyncProducer
from sluice.producer.errors import QueueUnreachable
from sluice.producer.operations.durability import DurabilityPolicy
from sluice.producer.operations.operation import Operation, Result
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import ask_calls
from sluice.producer.operations.surveys import survey_all
from sluice.protocol import calls
from sluice.protocol.calls import QueueView
from sluice.protocol.job_ids import job_id_of
from sluice.protocol.jobs import CheckedJob, partition_of
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.urls import is_cluster
from sluice.protocol.scaling.backlog import BACKLOG_FIELDS

SURVEY_LIMIT_S = 1.0
"""A partition that takes longer counts as unavailable."""


class ServedModel(NamedTuple):
    """A model that living workers serve."""

    offers: tuple[str, ...]
    """The different offers of their engines."""

    parent: str | None = None
    """The model whose adapter it is."""


class Partitions:
    """The partitions of one queue. Changes with each reading of their state.

    Args:
        url: The URL of the queue's server.
        client: A client of the queue that fails soon while the server is unreachable.
    """

    def __init__(self, url: str | None, client: AsyncProducer) -> None:
        self._queue, self._client = client.target, client
        self._away: frozenset[int] = frozenset()
        self._durability = DurabilityPolicy()
        self._eager = _eager(self._queue, url)

    async def close(self) -> None:
        """Close the client that this object opened."""
        if self._eager is not None:
            await self._eager.close()

    async def surveys(self, *, has_lanes: bool = False) -> list[QueueView]:
        """Read the state of the available partitions, and the reported capacity of all workers.

        `has_lanes`: also the waiting jobs of each tenant.

        Raises:
            QueueUnreachable: no partition is available.
            InvalidSetting: the workers serve another number of partitions than the settings name.
        """
        return await self._read(lambda keys: survey_all(keys, fields=BACKLOG_FIELDS, has_lanes=has_lanes))

    async def models(self) -> Mapping[str, ServedModel]:
        """Read which models, and which adapters of them, the workers of the available partitions serve.

        Raises:
            QueueUnreachable, InvalidSetting: as `surveys`.
        """
        views = await self._read(lambda keys: ask_calls(list(map(calls.inspect, keys))))
        parents = {name: model for view in views for name, model in view.parents.items()}
        models = {model for view in views for model in view.models}
        offers = {
            model: tuple(sorted({offer for view in views for offer in view.offers.get(model, ())}))
            for model in models | set(parents.values())
        }
        return {model: ServedModel(offers[parents.get(model, model)], parents.get(model)) for model in models}

    async def _read(self, read: Callable[[Sequence[QueueKeys]], Operation[list[Result]]]) -> list[Result]:
        if self._eager is None:
            return await self._client.run(_of_all(self._queue, read))
        operations = [read([self._queue.keys(partition)]) for partition in range(self._queue.partitions)]
        reading = asyncio.gather(*(_answer(self._eager, operation) for operation in operations))
        _, answers = await asyncio.gather(_answer(self._eager, self._queue.read()), reading)
        if results := [result for answer in answers for result in answer or ()]:
            self._away = frozenset(partition for partition, answer in enumerate(answers) if answer is None)
            return results
        return await self._client.run(_of_all(self._queue, read))

    async def check(self) -> None:
        """Check that the queue accepts jobs with this number of partitions; pass while no server is reachable.

        The servers' answers are cached for some seconds, as for submits.

        Raises:
            InvalidSetting: the workers serve another number of partitions, or the queue's durability is wrong.
            DurabilityRefused: the server cannot guarantee that durability.
        """
        with suppress(QueueUnreachable):
            await (self._eager or self._client).run(self._durability.resolve(self._queue, None))

    def choose(self, name: str) -> int:
        """Return the partition of a new job from the last part of its id; an available one, if there is any."""
        answering = [partition for partition in range(self._queue.partitions) if partition not in self._away]
        partition = partition_of(name, self._queue.partitions)
        return answering[partition_of(name, len(answering))] if partition in self._away and answering else partition

    def placed(self, job: CheckedJob) -> CheckedJob:
        """Return a new job, with an id on an available partition if any partition is unavailable.

        A job with an id or an idempotency key is unchanged: its partition is fixed, and may have the job already.
        """
        if not self._away or not job.is_open:
            return job
        name = token_hex(12)
        return job.with_id(job_id_of(self.choose(name), job.template.tenant, name))


def _of_all(queue: Queue, read: Callable[[Sequence[QueueKeys]], Operation[list[Result]]]) -> Operation[list[Result]]:
    return (yield from read((yield from queue.all_keys())))


async def _answer(client: AsyncProducer, operation: Operation[Result]) -> Result | None:
    try:
        async with asyncio.timeout(SURVEY_LIMIT_S):
            return await client.run(operation)
    except (QueueUnreachable, TimeoutError):
        return None


def _eager(queue: Queue, url: str | None) -> AsyncProducer | None:
    """Return a client that does not wait for an unreachable shard; None if all partitions are on one server."""
    if url is None or not is_cluster(url) or queue.asked_partitions == 1:
        return None
    return AsyncProducer(url, queue=queue.name, partitions=queue.asked_partitions, patience_s=0)
