"""One shard of a Cluster is away: what of a client and of the gateway still works is all that is on the others."""

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from itertools import count

import pytest

from sluice.gateway.access import Caller
from sluice.gateway.queues import Queues
from sluice.gateway.rates import KeyRates
from sluice.gateway.readers import Abandoned
from sluice.gateway.settings import GatewaySettings, ServedQueue
from sluice.producer import AsyncProducer, Producer
from sluice.producer.errors import QueueUnreachable
from sluice.producer.operations.follow import StreamEvent
from sluice.protocol import calls
from sluice.protocol.jobs import checked_job
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.clusters import Cluster, redis_cluster, wait_until_joined
from tests.integration.workers import running_worker

PARTITIONS = 3
NUMBERS = count(0, 100)
"""Where the names of queues begin: no two tests share one."""


@pytest.fixture(scope="module")
def cluster() -> Generator[Cluster]:
    with redis_cluster("valkey") as made:
        yield made


@pytest.fixture
def queue(cluster: Cluster) -> str:
    """A queue with a partition on each shard."""
    return cluster.queue_over_all(PARTITIONS, skip=next(NUMBERS))


@contextmanager
def away(cluster: Cluster, queue: str, *partitions: int) -> Generator[None]:
    """Kill the shards of partitions, and start them again."""
    shards = [cluster.shard_of(QueueKeys(queue, partition)) for partition in partitions]
    for shard in shards:
        shard.wait_until_written()
        shard.kill()
    try:
        yield
    finally:
        for shard in shards:
            shard.start()
        wait_until_joined(cluster)


def id_on(partition: int, number: int = 0) -> JobId:
    return JobId(f"{partition}.default.job{number}")


class TestGivenAStreamOnEachShard:
    """One loop reads them, as in a gateway."""

    async def test_when_one_shard_is_away_then_the_others_go_on_and_its_own_fails(
        self, cluster: Cluster, queue: str
    ) -> None:
        with running_worker(
            cluster.url, queue__name=queue, queue__partitions=PARTITIONS, model__path="null?step_s=0.02"
        ):
            async with AsyncProducer(cluster.url, queue=queue, partitions=PARTITIONS, patience_s=0.5) as producer:
                streams = [await self._begun(producer, partition) for partition in range(PARTITIONS)]

                with away(cluster, queue, 1):
                    with pytest.raises(QueueUnreachable):
                        await asyncio.wait_for(self._tokens(streams[1]), 10)
                    later = [await asyncio.wait_for(anext(streams[partition]), 5) for partition in (0, 2)]

                assert [event.end for event in later] == [None, None], "they were still being generated"
                await producer.cancel_many([id_on(partition) for partition in range(PARTITIONS)])

    async def _begun(self, producer: AsyncProducer, partition: int) -> AsyncIterator[StreamEvent]:
        job = await producer.submit("hello", job_id=id_on(partition), max_tokens=1000, ignore_eos=True)
        stream = producer.stream(job)
        await anext(stream)
        return stream

    async def _tokens(self, stream: AsyncIterator[StreamEvent]) -> int:
        return sum([len(event.token_ids) async for event in stream])

    async def test_when_many_wait_for_its_jobs_then_others_are_still_answered(
        self, cluster: Cluster, queue: str
    ) -> None:
        async with AsyncProducer(cluster.url, queue=queue, partitions=PARTITIONS, patience_s=30) as producer:
            jobs = [await producer.submit("hello", job_id=id_on(1, number)) for number in range(40)]
            other = await producer.submit("hello", job_id=id_on(0))

            with away(cluster, queue, 1):
                waiting = [asyncio.create_task(producer.status(job)) for job in jobs]
                assert await asyncio.wait(waiting, timeout=0.2) == (set(), set(waiting))
                found = await asyncio.wait_for(producer.status(other), 5)

            assert found.id == other.id
            assert {one.id for one in await asyncio.gather(*waiting)} == {job.id for job in jobs}


class TestGivenTheShardWithTheSettings:
    """Submits look there for the durability that the queue asks for."""

    async def test_when_it_is_away_then_submits_to_the_others_are_taken(self, cluster: Cluster, queue: str) -> None:
        made = AsyncProducer(cluster.url, queue=queue, partitions=PARTITIONS, patience_s=0.2)

        with away(cluster, queue, 0):
            async with made as producer:
                receipt = await producer.submit("hello", job_id=id_on(2))
            with Producer(cluster.url, queue=queue, partitions=PARTITIONS, patience_s=0.2) as blocking:
                again = blocking.submit("hello", job_id=id_on(2))

        assert (receipt.id, again.is_duplicate) == (id_on(2), True)


class TestGivenJobsWhoseSubmitsWereNotAnswered:
    """One on each shard."""

    async def test_when_one_shard_is_away_then_the_jobs_of_the_others_are_cancelled(
        self, cluster: Cluster, queue: str
    ) -> None:
        async with AsyncProducer(cluster.url, queue=queue, partitions=PARTITIONS, patience_s=0.2) as producer:
            jobs = Abandoned(producer, limit_s=60)
            for partition in range(PARTITIONS):
                jobs.add((await producer.submit("hello", job_id=id_on(partition))).id)

            with away(cluster, queue, 1):
                await jobs.close()
                states = [(await producer.status(id_on(partition))).state for partition in (0, 2)]

        assert states == [JobState.CANCELLED, JobState.CANCELLED]


class TestGivenAGateway:
    """A worker has sent heartbeats to all partitions."""

    @pytest.fixture
    async def queues(self, cluster: Cluster, queue: str) -> AsyncIterator[Queues]:
        beat = calls.Beat(incarnation="w", held=(), processed_pull=0, expiry_ms=60_000, about={"model": "m"})
        for partition in range(PARTITIONS):
            keys = QueueKeys(queue, partition)
            with cluster.shard_of(keys).client() as client:
                run(client, calls.beat(keys, beat))
        settings = GatewaySettings(
            redis_url=cluster.url,
            database_url="sqlite:////nowhere/history.db",
            queues=(ServedQueue(queue, PARTITIONS),),
        )
        async with Queues(settings, look_every_s=0) as made:
            await made.look()
            yield made

    @pytest.mark.parametrize("partition", [0, *(pytest.param(other, marks=pytest.mark.long) for other in (1, 2))])
    async def test_when_a_shard_is_away_then_models_are_known_and_jobs_go_to_the_others(
        self, cluster: Cluster, queue: str, queues: Queues, partition: int
    ) -> None:
        rates = KeyRates(queues.first.submitting, queue)

        with away(cluster, queue, partition):
            assert await queues.models() == ("m",)
            jobs = [checked_job("hello", {}) for _ in range(20)]
            receipts = [(await rates.submit(queues.first, Caller(), job))[0] for job in jobs]

        assert {int(receipt.id[0]) for receipt in receipts} == {*range(PARTITIONS)} - {partition}
        assert not any(receipt.is_duplicate for receipt in receipts)

    async def test_when_it_returns_then_it_gets_jobs_again(self, cluster: Cluster, queue: str, queues: Queues) -> None:
        with away(cluster, queue, 1):
            await queues.look()
            placed = queues.first.partitions.placed(checked_job("hello", {}))
        await queues.look()

        assert placed.is_chosen
        assert not queues.first.partitions.placed(checked_job("hello", {})).is_chosen

    async def test_when_an_id_or_key_is_given_then_the_job_stays_where_it_may_be(
        self, cluster: Cluster, queue: str, queues: Queues
    ) -> None:
        jobs = [checked_job("hello", {"job_id": id_on(1)}), checked_job("hello", {"idempotency_key": "k"})]

        with away(cluster, queue, 1):
            await queues.look()
            placed = [queues.first.partitions.placed(job) for job in jobs]

        assert placed == jobs

    async def test_when_all_are_away_then_it_is_unreachable(self, cluster: Cluster, queue: str, queues: Queues) -> None:
        with away(cluster, queue, *range(PARTITIONS)), pytest.raises(QueueUnreachable):
            await queues.look()
