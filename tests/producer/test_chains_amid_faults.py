"""Chains amid faults on a real server: a full queue, a shard that is away and a damaged key delay only their jobs."""

from collections.abc import Generator
from typing import Any

import pytest
from redis.exceptions import ClusterDownError

from sluice.producer import JobId, JobState, Producer, QueueFull, Receipt, after
from sluice.protocol.chains.chain import ChainKeys
from sluice.protocol.chains.releasing import ChainLook, ChainWatch
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import Command, run_commands
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

KEYS = ChainKeys(QueueKeys("default"))


def bound(client: Any, max_jobs: int, partition: int = 0) -> None:
    """Let a partition of the queue take this many waiting jobs."""
    client.hset(QueueKeys("default", partition).key("config"), "max_waiting_jobs", max_jobs)


def doomed(producer: Producer, tenant: str, partition: int = 0) -> Receipt:
    """Submit a job whose cancel releases others."""
    parent = producer.submit("parent", tenant=tenant, job_id=JobId(f"{partition}.{tenant}.parent"))
    producer.cancel(parent)
    return parent


class TestGivenATenantAtItsShare:
    """The queue takes ten jobs. Of them `acme` may have five and has five."""

    def test_when_a_job_of_each_tenant_is_due_then_that_of_the_other_is_released(
        self, producer: Producer, redis_client: Any
    ) -> None:
        bound(redis_client, 10)
        children = {
            tenant: producer.submit("child", tenant=tenant, after=after(doomed(producer, tenant), on_failure="release"))
            for tenant in ("acme", "beta")
        }
        for _ in range(5):
            producer.submit("another", tenant="acme")

        look = producer.release_chains()

        assert producer.status(children["beta"]).state is JobState.QUEUED
        assert producer.status(children["acme"]).state is JobState.BLOCKED
        assert [message.partition(" has 5 jobs")[0] for _, message in look.problems] == ["tenant acme"]

    def test_when_a_blocked_job_of_it_is_cancelled_then_it_ends(self, producer: Producer, redis_client: Any) -> None:
        bound(redis_client, 10)
        doomed(producer, "beta")
        parent, *_ = [producer.submit("another", tenant="acme") for _ in range(5)]
        child = producer.submit("child", tenant="acme", after=[parent])
        producer.cancel(child)

        look = producer.release_chains()

        assert look.problems == []
        assert producer.status(child).state is JobState.CANCELLED
        assert producer.queue()[0].waiting_jobs == 5


class TestGivenAFullQueue:
    """It takes one job, and a chain waits for that."""

    @pytest.fixture
    def parent(self, producer: Producer) -> Receipt:
        return producer.submit("parent")

    @pytest.fixture
    def children(self, producer: Producer, parent: Receipt, redis_client: Any) -> list[JobId]:
        ids = [JobId(str(answer)) for answer in producer.submit_many(["one", "two"], after=[parent])]
        bound(redis_client, 1)
        return ids

    def test_when_a_blocked_job_is_cancelled_then_it_ends(self, producer: Producer, children: list[JobId]) -> None:
        producer.cancel(children[0])

        look = producer.release_chains()

        assert look.problems == []
        assert [producer.status(child).state for child in children] == [JobState.CANCELLED, JobState.BLOCKED]

    def test_when_the_other_fails_then_the_chain_is_cancelled(
        self, producer: Producer, parent: Receipt, children: list[JobId]
    ) -> None:
        producer.cancel(parent)
        producer.submit("another")

        look = producer.release_chains()

        assert look.problems == []
        assert [producer.status(child).state for child in children] == [JobState.CANCELLED] * 2
        assert producer.queue()[0].waiting_jobs == 1

    def test_when_the_server_is_at_its_maxmemory_then_a_cancelled_job_ends_once_there_is_room(
        self, producer: Producer, children: list[JobId], redis_client: Any
    ) -> None:
        producer.cancel(children[0])
        redis_client.config_set("maxmemory", 1)
        try:
            with pytest.raises(QueueFull):
                producer.release_chains()
        finally:
            redis_client.config_set("maxmemory", 0)

        producer.release_chains()

        assert producer.status(children[0]).state is JobState.CANCELLED


class TestGivenAFullPartition:
    def test_when_jobs_of_each_partition_are_due_then_those_of_the_others_are_released(
        self, valkey: RedisServer, redis_client: Any
    ) -> None:
        with Producer(valkey.url, partitions=3) as producer:
            children = [
                producer.submit(
                    "child",
                    job_id=JobId(f"{i}.default.child"),
                    after=after(doomed(producer, "default", i), on_failure="release"),
                )
                for i in range(3)
            ]
            producer.submit("another", job_id=JobId("0.default.another"))
            bound(redis_client, 1)

            look = producer.release_chains()

            states = [producer.status(child).state for child in children]
        assert states == [JobState.BLOCKED, JobState.QUEUED, JobState.QUEUED]
        assert len(look.problems) == 1

    def test_when_many_chains_are_due_then_one_of_them_is_tried(self, producer: Producer, redis_client: Any) -> None:
        parent = doomed(producer, "default")
        for _ in range(20):
            producer.submit("child", after=after(parent, on_failure="release"))
        producer.submit("another")
        bound(redis_client, 1)
        calls = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]

        look = producer.release_chains()

        assert redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] - calls == 1
        assert len(look.problems) == 1
        assert redis_client.hlen(KEYS.blocked) == 20


class TestGivenAResultOfAnotherType:
    """The jobs of two chains use the outputs of two jobs that are done. The result of the first is a list."""

    def test_when_both_are_due_then_the_other_is_released_and_the_first_is_a_problem(
        self, producer: Producer, worker: HandWorker, redis_client: Any
    ) -> None:
        parents = [producer.submit("parent", job_id=JobId(f"0.default.{name}")) for name in "ab"]
        children = [producer.submit("{{outputs[0]}}", after=[parent]) for parent in parents]
        first = next(chain.id for chain in producer.chains() if chain.job_ids == (children[0].id,))
        for leased in worker.pull():
            worker.generate(leased)
        redis_client.delete(KEYS.queue.result(parents[0].id))
        redis_client.rpush(KEYS.queue.result(parents[0].id), "no result")

        look = producer.release_chains()

        assert [producer.status(child).state for child in children] == [JobState.BLOCKED, JobState.QUEUED]
        [(chain, message)] = look.problems
        assert chain == first
        assert message.startswith(f"output of job {parents[0].id}: ")


def is_of(command: Command, partition: int) -> bool:
    """Return whether a command has a key of the partition."""
    prefix = QueueKeys("default", partition).prefix
    return any(isinstance(part, str) and part.startswith(prefix) for part in command)


def look_without(client: Any, partition: int) -> ChainLook:
    """Look while the shard of a partition is away: the reply to its commands is an error, as on a Cluster."""
    look = ChainLook()
    steps = ChainWatch(QueueKeys("default")).release(look)
    commands = next(steps)
    while True:
        down = ClusterDownError("CLUSTERDOWN the shard does not answer")
        replies = [down if is_of(one, partition) else run_commands(client, [one])[0] for one in commands]
        try:
            commands = steps.send(replies)
        except StopIteration:
            return look


class TestGivenAShardThatIsAway:
    """The queue has two partitions."""

    @pytest.fixture
    def producer(self, valkey: RedisServer) -> Generator[Producer]:
        with Producer(valkey.url, partitions=2) as made:
            yield made

    @pytest.fixture
    def workers(self, redis_client: Any) -> list[HandWorker]:
        return [HandWorker(redis_client, QueueKeys("default", partition)) for partition in range(2)]

    @pytest.fixture
    def parents(self, producer: Producer) -> list[Receipt]:
        """Submit a job to each partition."""
        return [producer.submit("parent", job_id=JobId(f"{i}.default.parent")) for i in range(2)]

    def test_when_a_chain_uses_an_output_there_then_it_waits_and_another_is_released(
        self, producer: Producer, workers: list[HandWorker], parents: list[Receipt], redis_client: Any
    ) -> None:
        waiting = producer.submit("{{outputs[1]}}", job_id=JobId("0.default.waiting"), after=parents)
        other = producer.submit("other", job_id=JobId("0.default.other"), after=parents[:1])
        for worker in workers[::-1]:
            [leased] = worker.pull()
            worker.generate(leased)
            if worker is workers[1]:
                producer.release_chains()

        away = look_without(redis_client, 1)
        states = [producer.status(child).state for child in (waiting, other)]
        producer.release_chains()

        assert states == [JobState.BLOCKED, JobState.QUEUED]
        [(_, message)] = away.problems
        assert message == f"output of job {parents[1].id}: CLUSTERDOWN the shard does not answer"
        assert producer.status(waiting).state is JobState.QUEUED

    def test_when_a_flagged_job_was_released_there_then_it_is_cancelled_once_the_shard_is_back(
        self, producer: Producer, parents: list[Receipt], redis_client: Any
    ) -> None:
        # As if a cancel had found them blocked, and another process had released them since.
        redis_client.hset(KEYS.cancelled, mapping=dict.fromkeys((parent.id for parent in parents), "not needed"))

        away = look_without(redis_client, 1)
        before = [producer.status(parent).state for parent in parents]
        producer.release_chains()

        assert before == [JobState.CANCELLED, JobState.QUEUED]
        said = f"cancel of job {parents[1].id}: CLUSTERDOWN the shard does not answer"
        assert away.problems == [(parents[1].id, said)]
        assert producer.status(parents[1]).state is JobState.CANCELLED
        assert redis_client.hlen(KEYS.cancelled) == 0

    def test_when_it_is_that_of_the_chains_then_the_look_ends(self, redis_client: Any) -> None:
        with pytest.raises(ClusterDownError):
            look_without(redis_client, 0)
