"""Requests that a worker rejects, and the dead set of their queue."""

from collections.abc import Generator
from pathlib import Path

import pytest

from sluice.producer import Producer
from sluice.producer.errors import JobFailed
from sluice.producer.operations.dead import DeadFilter
from sluice.protocol.calls import QueueSettings
from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import gateway_process
from tests.servers import RedisServer


@pytest.fixture
def served(valkey: RedisServer, tmp_path: Path) -> Generator[RedisServer]:
    """A queue with a worker."""
    with worker_pool(valkey.url, tmp_path) as pool:
        pool.start_all(1)
        yield valkey


class TestGivenADeadSetOfOnePlaceThatIsTaken:
    def test_when_prompts_are_too_long_then_each_is_a_400_and_the_failure_stays(self, served: RedisServer) -> None:
        with Producer(served.url) as producer, gateway_process(served.url) as gateway, gateway.http() as http:
            producer.configure(QueueSettings(dead_set_max=1))
            failure = producer.submit("hello", model="gone")
            with pytest.raises(JobFailed, match="gone"):
                producer.result(failure)

            body = {"prompt": "word " * 20_000, "max_tokens": 1}
            answers = [http.post("/v1/completions", json=body) for _ in range(2)]

            errors = [one.json()["error"] for one in answers]
            assert {one.status_code for one in answers} == {400}
            assert {(error["code"], error["param"]) for error in errors} == {("context_length_exceeded", "prompt")}
            assert [view.id for view in producer.dead(DeadFilter())] == [failure.id]


class TestGivenMoreTokensAskedForThanTheContextHas:
    def test_when_max_tokens_are_stated_then_it_is_a_400_and_else_the_answer_is_what_fits(
        self, served: RedisServer
    ) -> None:
        with gateway_process(served.url) as gateway, gateway.http() as http:
            chat = {"model": "null", "messages": [{"role": "user", "content": "hello"}]}
            answers = [
                http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 100_000}),
                http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 100_000}),
                http.post("/v1/chat/completions", json={**chat, "max_completion_tokens": 100_000}),
                http.post("/v1/chat/completions", json={**chat, "stream": True, "max_tokens": 100_000}),
            ]

            assert [one.status_code for one in answers] == [400] * 4
            errors = [one.json()["error"] for one in answers]
            assert {error["code"] for error in errors} == {"context_length_exceeded"}
            assert [error["param"] for error in errors] == ["prompt", "prompt", "messages", "messages"]
            assert http.post("/v1/chat/completions", json=chat).status_code == 200
