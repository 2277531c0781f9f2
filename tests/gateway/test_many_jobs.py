"""Requests that are several jobs: what they cost their key, and what becomes of their jobs if one is refused."""

import asyncio
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from starlette.requests import Request

from sluice.gateway.access import Caller
from sluice.gateway.many_jobs import ManyJobs
from sluice.gateway.queues import Queues
from sluice.gateway.rates import KeyRates
from sluice.gateway.settings import GatewaySettings
from sluice.producer import AsyncProducer, Producer, QueueSettings
from sluice.protocol.jobs import Options
from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process, new_key
from tests.gateway.test_idempotency_key import wait_for
from tests.servers import RedisServer, redis_server

EMBEDDINGS = "/v1/embeddings"


LIMITS = {"few requests": {"rpm": 2}, "both": {"rpm": 2, "tpm": 1000}, "few tokens": {"tpm": 9}}


@dataclass(frozen=True)
class Guarded:
    """A gateway, and a key for each of `LIMITS`."""

    gateway: GatewayProcess
    keys: Mapping[str, str]


@pytest.fixture(scope="module")
def guarded(queue_server: RedisServer, keys_url: str) -> Generator[Guarded]:
    """A gateway that takes keys."""
    keys = {name: new_key(keys_url, "acme", **limits) for name, limits in LIMITS.items()}
    with gateway_process(queue_server.url, database_url=keys_url) as made:
        yield Guarded(made, keys)


@pytest.fixture
def lone_server() -> Generator[RedisServer]:
    """A server without a worker."""
    with redis_server("valkey") as server:
        yield server


def embedded(
    gateway: GatewayProcess, texts: list[str], *, api_key: str | None = None, idempotency_key: str | None = None
) -> httpx.Response:
    """Ask for the vectors of texts."""
    headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
    with gateway.http(api_key) as http:
        return http.post(EMBEDDINGS, json={"input": texts}, headers=headers)


class TestGivenAKeyWithLimits:
    def test_when_a_request_has_more_inputs_than_the_limit_then_it_is_one_request(self, guarded: Guarded) -> None:
        answer = embedded(guarded.gateway, ["four"] * 10, api_key=guarded.keys["both"])

        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        assert answer.headers["x-ratelimit-remaining-tokens"] == "990"

    def test_when_its_texts_are_more_than_the_limit_of_tokens_then_it_is_400_with_the_reason(
        self, guarded: Guarded
    ) -> None:
        answer = embedded(guarded.gateway, ["four"] * 10, api_key=guarded.keys["few tokens"])

        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "request_too_large", "input")
        assert "10 tokens" in error["message"]
        assert "limit is 9 a minute" in error["message"]

    def test_when_its_key_is_repeated_then_it_is_counted_once(self, guarded: Guarded) -> None:
        key, repeated = guarded.keys["few requests"], uuid4().hex

        first, *others = (
            embedded(guarded.gateway, ["four"] * 10, api_key=key, idempotency_key=repeated) for _ in range(4)
        )

        assert [other.json() for other in others] == [first.json()] * 3


class TestGivenIdempotencyKeys:
    @pytest.mark.parametrize(("num_chars", "ends"), [(240, ("a", "b")), (32, ("", "#1"))], ids=["long", "numbered"])
    def test_when_they_are_similar_then_their_requests_do_not_meet(
        self, gateway: GatewayProcess, num_chars: int, ends: tuple[str, str]
    ) -> None:
        begin = uuid4().hex.ljust(num_chars, "k")
        first, second = (begin + end for end in ends)

        answers = [
            embedded(gateway, ["one", "two"], idempotency_key=first),
            embedded(gateway, ["three", "four"], idempotency_key=second),
        ]

        assert [answer.status_code for answer in answers] == [200, 200], answers[1].text


class TestGivenARequestOneOfWhoseJobsIsRefused:
    def test_when_another_request_reads_the_others_then_they_go_on(
        self, lone_server: RedisServer, tmp_path: Path
    ) -> None:
        with (
            gateway_process(lone_server.url) as gateway,
            worker_pool(lone_server.url, tmp_path) as workers,
            Producer(lone_server.url) as producer,
            ThreadPoolExecutor(1) as threads,
        ):
            reading = threads.submit(embedded, gateway, ["a", "b"], idempotency_key="shared")
            wait_for(lambda: num_waiting(producer) == 2)

            refused = embedded(gateway, ["a", "c"], idempotency_key="shared")
            workers.start_all(1)

            assert refused.status_code == 422
            assert reading.result().status_code == 200, reading.result().text

    def test_when_nobody_else_can_read_the_others_then_they_are_cancelled(self, lone_server: RedisServer) -> None:
        with gateway_process(lone_server.url) as gateway, Producer(lone_server.url) as producer:
            producer.configure(QueueSettings(max_waiting_jobs=2))

            refused = embedded(gateway, ["a", "b", "c"])

            assert refused.status_code == 429
            wait_for(lambda: num_waiting(producer) == 0)


class TestGivenARequestThatIsCancelled:
    async def test_when_some_jobs_were_submitted_then_they_are_cancelled(self, valkey: RedisServer) -> None:
        settings = GatewaySettings(redis_url=valkey.url, database_url="sqlite:////nowhere/history.db")
        request = Request({"type": "http", "headers": [], "state": {"caller": Caller()}})

        async with Queues(settings) as queues, AsyncProducer(valkey.url) as client:
            many = ManyJobs(queues, KeyRates(client, "default"), settings)
            asking = asyncio.create_task(many.answers(request, ["a"] * 2000, Options(embed=True), {}))
            while await num_waiting_now(client) < 100:
                assert not asking.done(), asking.result()
            asking.cancel()
            await asyncio.wait((asking,))
            await queues.first.readers.close()
            left = await num_waiting_now(client)

        # The answers to some submits were not awaited.
        assert left <= 64


def num_waiting(producer: Producer) -> int:
    """The waiting jobs of the queue."""
    return sum(view.waiting_jobs for view in producer.queue())


async def num_waiting_now(client: AsyncProducer) -> int:
    """The same, asked by a client of asyncio."""
    return sum(view.waiting_jobs for view in await client.queue())
