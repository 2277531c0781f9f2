"""A Redis that keeps its connections and answers nothing, as one does that is stopped, or whose host hangs."""

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from sluice.protocol.keys import QueueKeys
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.integration.jobs import wait_until
from tests.servers import RedisServer, redis_server

CHAT = "/v1/chat/completions"
JOBS = "/jobs?queue=default"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}  # Any: JSON
SOON_S = 10.0
"""More than the gateway's three seconds and the time that a busy machine takes; far less than the 15 s of sockets."""


@dataclass(frozen=True)
class Frozen:
    """A gateway that knows its queue, whose server has just stopped answering."""

    gateway: GatewayProcess
    server: RedisServer


@pytest.fixture
def frozen() -> Generator[Frozen]:
    """One for each test."""
    with redis_server("valkey") as server, gateway_process(server.url) as gateway:
        with gateway.http() as http:
            http.post(JOBS, json={"prompt": "first"})  # loads the script
        assert gateway.get("/readyz").status_code == 200
        server.freeze()
        yield Frozen(gateway, server)
        server.thaw()


def counted(client: Any, name: str) -> int:  # Any: redis-py types it in part
    """A counter of the queue."""
    return int(client.hget(QueueKeys("default").key("counters"), name) or 0)


def first_refusal(gateway: GatewayProcess) -> tuple[httpx.Response, list[float]]:
    """The first answer that it is not ready, with the time of each; for a second, what it saw before counts."""
    seconds = list[float]()
    while True:
        began_s = time.monotonic()
        ready = gateway.get("/readyz")
        seconds.append(time.monotonic() - began_s)
        if ready.status_code != 200:
            return ready, seconds
        assert len(seconds) < 20


class TestGivenAServerThatHangs:
    def test_when_many_requests_come_then_each_is_soon_a_503_that_says_when_to_retry(self, frozen: Frozen) -> None:
        def timed(_number: int) -> tuple[httpx.Response, float]:
            began_s = time.monotonic()
            with frozen.gateway.http() as http:
                return http.post(CHAT, json=HELLO), time.monotonic() - began_s

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(timed, range(20)))

        assert {(one.status_code, one.json()["error"]["code"]) for one, _ in answers} == {(503, "queue_unreachable")}
        assert {one.headers["retry-after"] for one, _ in answers} == {"1"}
        assert max(seconds for _, seconds in answers) < SOON_S

    def test_when_it_is_asked_whether_it_is_ready_then_it_soon_says_no(self, frozen: Frozen) -> None:
        ready, seconds = first_refusal(frozen.gateway)

        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "queue_unreachable")
        assert max(seconds) < SOON_S

    def test_when_it_reads_a_submit_later_then_the_job_is_cancelled(self, frozen: Frozen) -> None:
        with frozen.gateway.http() as http:
            assert http.post(JOBS, json={"prompt": "hello"}).status_code == 503

        frozen.server.thaw()

        with frozen.server.client() as client:
            wait_until(lambda: counted(client, "cancelled") == 1, "it is cancelled")
            assert (counted(client, "submitted"), counted(client, "waiting_jobs")) == (2, 1)

    def test_when_a_submit_has_a_key_then_its_retry_finds_the_job(self, frozen: Frozen) -> None:
        body = {"prompt": "hello", "idempotency_key": "k"}
        with frozen.gateway.http() as http:
            assert http.post(JOBS, json=body).status_code == 503

            frozen.server.thaw()

            assert http.post(JOBS, json=body).json()["state"] == "queued"
        with frozen.server.client() as client:
            assert (counted(client, "submitted"), counted(client, "waiting_jobs")) == (2, 2)

    def test_when_it_answers_again_then_requests_are_served(self, frozen: Frozen) -> None:
        first_refusal(frozen.gateway)

        frozen.server.thaw()

        with frozen.gateway.http() as http:
            assert http.post("/jobs", json={"prompt": "hello"}).status_code == 201
