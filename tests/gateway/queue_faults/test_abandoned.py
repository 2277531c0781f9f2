"""Jobs whose submits were not answered: which are cancelled, for how long the gateway tries, and what it logs."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

import pytest

from sluice.gateway import readers
from sluice.gateway.queues import Queues
from sluice.gateway.readers import Abandoned
from sluice.gateway.settings import GatewaySettings, ServedQueue
from sluice.producer import AsyncProducer
from sluice.producer.errors import AccessDenied
from sluice.protocol.jobs import checked_job
from sluice.protocol.states import JobState
from tests.integration.jobs import wait_until
from tests.servers import RedisServer, redis_server

WAITING = "Jobs whose submits were not answered wait to be cancelled"
DROPPED = "Jobs whose submits were not answered are not cancelled"
LIMIT_S = 5.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One for each test, which may kill it."""
    with redis_server(is_durable=True) as made:
        yield made


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CANCEL_EVERY_S", 0.05)


@asynccontextmanager
async def client_of(server: RedisServer, *, patience_s: float = 0.1) -> AsyncGenerator[AsyncProducer]:
    async with AsyncProducer(server.url, patience_s=patience_s) as client:
        yield client


async def until_none(jobs: Abandoned) -> None:
    """Wait until nothing is left to do."""
    await asyncio.to_thread(wait_until, lambda: len(jobs) == 0, "nothing is left to do")


class TestGivenAUserWithoutRights:
    async def test_when_it_submits_then_the_job_is_not_looked_for(self, server: RedisServer) -> None:
        with server.client() as admin:
            admin.execute_command("ACL", "SETUSER", "nobody", "on", ">pw", "~*", "+ping", "+client|setname", "+hget")
        url = f"unix://nobody:pw@{server.socket_path}"
        settings = GatewaySettings(
            redis_url=url, database_url="sqlite:////nowhere/history.db", queues=(ServedQueue("default", 1),)
        )

        async with Queues(settings) as queues:
            with pytest.raises(AccessDenied):
                await queues.first.submit(checked_job("hello", {"tenant": "t"}))

            assert len(queues.first.abandoned) == 0


class TestGivenAJobOfWhichNobodyKnows:
    async def test_when_its_server_refuses_the_cancel_then_it_is_tried_once_and_logged(
        self, server: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with client_of(server) as client:
            receipt, jobs = await client.submit("hello"), Abandoned(client, LIMIT_S)
            with server.client() as admin:
                admin.execute_command("ACL", "SETUSER", "default", "-eval", "-evalsha")

                jobs.add(receipt.id)
                await until_none(jobs)

                admin.execute_command("ACL", "SETUSER", "default", "+@all")

        assert caplog.messages == [DROPPED]

    async def test_when_its_server_is_gone_then_it_is_dropped_at_its_limit_and_logged(
        self, server: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with client_of(server) as client:
            receipt, jobs = await client.submit("hello"), Abandoned(client, 1.0)
            server.kill()

            jobs.add(receipt.id)
            await until_none(jobs)

        assert caplog.messages == [WAITING, DROPPED]

    async def test_when_its_server_returns_then_it_is_cancelled(self, server: RedisServer) -> None:
        async with client_of(server, patience_s=10) as client:
            receipt, jobs = await client.submit("hello"), Abandoned(client, LIMIT_S)
            server.kill()
            jobs.add(receipt.id)

            server.start()
            await until_none(jobs)

            assert (await client.status(receipt)).state is JobState.CANCELLED

    async def test_when_it_comes_while_the_gateway_stops_then_it_is_cancelled(self, server: RedisServer) -> None:
        async with client_of(server) as client:
            first, second = [await client.submit("hello") for _ in range(2)]
            jobs = Abandoned(client, LIMIT_S)
            jobs.add(first.id)
            stopping = asyncio.create_task(jobs.close())
            await asyncio.sleep(0)

            jobs.add(second.id)
            await stopping

            states = [(await client.status(receipt)).state for receipt in (first, second)]
            assert states == [JobState.CANCELLED, JobState.CANCELLED]
