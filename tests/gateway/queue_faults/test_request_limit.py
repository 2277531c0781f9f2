"""`--request-limit` ends a request whether or not a worker is alive."""

from collections.abc import Generator
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import openai
import pytest

from sluice.producer import Producer
from sluice.protocol.states import JobState
from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.gateway.responses.reading import wait_until_ended
from tests.servers import RedisServer, redis_server

pytestmark = pytest.mark.slow

LIMIT_S = 1.0
SPARE_S = 3.0
"""A look a second, and a busy machine's."""

LIFE_S = 1.0
"""A heartbeat's lifetime, after which a worker that was killed with its host counts as dead."""

ROUTES: dict[str, dict[str, Any]] = {  # Any: bodies of requests
    "/v1/completions": {"prompt": "once", "max_tokens": 1000},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "once"}], "max_tokens": 1000},
    "/v1/responses": {"input": "once", "max_output_tokens": 1000, "store": False},
}


@pytest.fixture(scope="module")
def unserved() -> Generator[GatewayProcess]:
    """A gateway whose queue has no worker."""
    with redis_server("valkey") as server, gateway_process(server.url, "--request-limit", str(LIMIT_S)) as made:
        yield made


class TestGivenAQueueWithoutWorkers:
    @pytest.mark.parametrize("path", ROUTES)
    def test_when_a_whole_answer_is_asked_for_then_it_is_504_at_the_limit(
        self, unserved: GatewayProcess, path: str
    ) -> None:
        begin_s = monotonic()
        with unserved.http() as http:
            answer = http.post(path, json=ROUTES[path] | {"model": "m"})

        assert LIMIT_S * 0.9 < monotonic() - begin_s < LIMIT_S + SPARE_S
        assert is_late(path, answer)

    @pytest.mark.parametrize("path", ROUTES)
    def test_when_a_stream_is_asked_for_then_it_ends_with_an_error_at_the_limit(
        self, unserved: GatewayProcess, path: str
    ) -> None:
        begin_s = monotonic()
        with unserved.http() as http:
            answer = http.post(path, json=ROUTES[path] | {"model": "m", "stream": True})

        assert monotonic() - begin_s < LIMIT_S + SPARE_S
        assert "time limit" in answer.text
        assert "[DONE]" not in answer.text


def is_late(path: str, answer: httpx.Response) -> bool:
    """Whether an answer says that its job has expired."""
    if path == "/v1/responses" and answer.status_code == 200:
        return answer.json()["status"] == "failed" and "time limit" in answer.text
    return answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"


@pytest.fixture(scope="module")
def hasty(queue_server: RedisServer) -> Generator[GatewayProcess]:
    """A gateway whose queue has a worker."""
    with gateway_process(queue_server.url, "--request-limit", str(LIMIT_S)) as made:
        yield made


class TestGivenAWorkerThatIsSlow:
    def test_when_an_answer_takes_longer_then_it_is_504(self, hasty: GatewayProcess) -> None:
        with pytest.raises(openai.InternalServerError) as raised:
            hasty.client().completions.create(model="null", prompt="once", max_tokens=4000)

        assert (raised.value.status_code, raised.value.code) == (504, "timeout")

    def test_when_a_stream_takes_longer_then_it_raises(self, hasty: GatewayProcess) -> None:
        with (
            hasty.client().completions.create(model="null", prompt="once", max_tokens=4000, stream=True) as stream,
            pytest.raises(openai.APIError, match="within the time limit"),
        ):
            list(stream)

    def test_when_a_response_is_in_the_background_then_it_goes_on(
        self, queue_server: RedisServer, sqlite_url: str
    ) -> None:
        with gateway_process(queue_server.url, "--request-limit", str(LIMIT_S), database_url=sqlite_url) as gateway:
            client = gateway.client()

            made = client.responses.create(model="null", input="hello", max_output_tokens=150, background=True)

            assert wait_until_ended(client, made.id).status == "incomplete"


class TestGivenAWorkerThatIsKilledWithItsHost:
    def test_when_it_streams_then_the_stream_ends_after_the_limit(self, tmp_path: Path) -> None:
        """Nobody reports its death, and no other worker looks for it."""
        with (
            redis_server("valkey") as server,
            worker_pool(server.url, tmp_path) as pool,
            gateway_process(server.url, "--request-limit", "3") as gateway,
            gateway.http() as http,
        ):
            [worker] = pool.start_all(1)
            begin_s, killed_s, num_lines, last = monotonic(), 0.0, 0, ""
            body = {"prompt": "once", "max_tokens": 1000, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as stream:
                for line in stream.iter_lines():
                    num_lines, last = num_lines + 1, line or last
                    if num_lines == 10:
                        killed_s = monotonic() - begin_s
                        worker.kill()

            assert 0 < killed_s < 3, "the worker was alive at the limit"
            assert monotonic() - begin_s < 3 + LIFE_S + SPARE_S
            assert "time limit" in last
            assert states_in(server) == [JobState.EXPIRED]


def states_in(server: RedisServer) -> list[JobState]:
    """The states of all jobs."""
    with server.client() as client, Producer(server.url) as producer:
        hashes = [name.decode() for name in client.scan_iter("{default:0}:2:job:*")]
        ids = ["0." + ".".join(name.split(":")[-2:]) for name in hashes]
        return [view.state for view in producer.views(ids) if view is not None]
