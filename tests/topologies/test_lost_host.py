"""A host that is gone answers nothing, not even that its port is closed: a client with a short patience goes elsewhere.

It gives up a call while the sockets could still wait, and must learn all the same which address is dead.
"""

import socket
import time
from collections.abc import Generator
from contextlib import ExitStack

import pytest

from sluice.producer import AsyncProducer, Producer
from sluice.producer.errors import QueueUnreachable, ResultTimeout
from sluice.protocol.redis.pools import SENTINEL_TIMEOUT_S
from tests.chaos.faults.replicated import SERVICE, watched
from tests.clusters import redis_cluster, replica_of
from tests.servers import free_port, redis_server

SOON_S = 15.0
"""Far more than the tries take; without what they learn, none succeeds."""


@pytest.fixture
def dead_port() -> Generator[int]:
    """A port whose queue of connections is full: the kernel drops what arrives, as if the host were gone."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", free_port()))
        listener.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


async def submit_soon(producer: AsyncProducer) -> int:
    """Submit until it succeeds; return how many tries failed."""
    deadline_s, num_failed = time.monotonic() + SOON_S, 0
    while True:
        try:
            await producer.submit("hello")
        except QueueUnreachable:
            num_failed += 1
            assert time.monotonic() < deadline_s, f"{num_failed} tries failed"
        else:
            return num_failed


class TestGivenSentinelsOfWhichTheFirstIsGone:
    async def test_when_jobs_are_submitted_then_the_next_is_asked(self, dead_port: int) -> None:
        with watched() as service:
            url = f"redis+sentinel://127.0.0.1:{dead_port},127.0.0.1:{service.sentinel_port}/{SERVICE}"
            async with AsyncProducer(url, patience_s=0.5) as producer:
                assert await submit_soon(producer) == 0

                began_s = time.monotonic()
                await producer.submit("hello")

                assert time.monotonic() - began_s < 0.5, "the first is not asked again"


class TestGivenSentinelsOfWhichTheFirstIsSilent:
    """It accepts connections, but its host answers no more."""

    def test_when_a_job_is_submitted_then_the_next_is_asked_soon(self) -> None:
        with watched() as service, socket.create_server(("127.0.0.1", 0)) as silent:
            addresses = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{service.sentinel_port}"
            with Producer(f"redis+sentinel://{addresses}/{SERVICE}") as producer:
                began_s = time.monotonic()
                producer.submit("hello")

        assert time.monotonic() - began_s < SENTINEL_TIMEOUT_S + 3, "the silent one is not waited for"


class TestGivenSentinelsOfWhichNoneAnswers:
    def test_when_a_job_is_submitted_then_the_error_names_each_by_its_address_alone(self) -> None:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        producer = Producer(f"redis+sentinel://{','.join(addresses)}/{SERVICE}", patience_s=0.0)

        with producer, pytest.raises(QueueUnreachable) as caught:
            producer.submit("hello")

        reason = str(caught.value).partition(" does not answer: ")[2]
        assert all(address in reason for address in addresses)
        assert "redis" not in reason
        assert "<" not in reason


class TestGivenAShardWhosePrimaryStops:
    @pytest.mark.parametrize("patience_s", [0.0, pytest.param(0.5, marks=pytest.mark.long)])
    async def test_when_its_replica_takes_over_then_jobs_are_submitted_there(self, patience_s: float) -> None:
        with redis_cluster("valkey", num_shards=1) as cluster, replica_of(cluster.servers[0]) as replica:
            url = f"{cluster.url},127.0.0.1:{replica.port}"
            async with AsyncProducer(url, patience_s=patience_s) as producer:
                await producer.submit("hello")
                cluster.servers[0].freeze()
                with replica.client() as client:
                    client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")

                num_failed = await submit_soon(producer)

                assert 1 <= num_failed <= 3


class TestGivenAReadThatBlocksForLongerThanASilenceLasts:
    async def test_when_no_entry_comes_then_it_is_no_outage(self) -> None:
        with redis_server() as server:
            async with AsyncProducer(server.url, patience_s=0.0) as producer:
                receipt = await producer.submit("hello", n=2)

                with pytest.raises(ResultTimeout):
                    await producer.result(receipt, timeout_s=2.5)
