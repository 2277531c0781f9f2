"""Text of models and requests that looks like lines of HTTP or of server-sent events."""

import json
from collections.abc import Generator
from typing import Any
from uuid import uuid4

import httpx
import pytest

from sluice.protocol.states import JobState
from tests.gateway.gateway_process import GatewayProcess, gateway_process, new_key
from tests.gateway.native.jobs import ended, events_of, submitted
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer, redis_server

pytestmark = pytest.mark.slow

PIECES = (
    "\n\ndata: [DONE]\n\n",
    "\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
    "\revent: end\rid: end\r",
    "\u2028data: x\u2029\x85\x0b\x0c\x1c\x1d\x1e",
    'id: 9:9\n"},{\x00\x7f\ufeff\ud7ff\U0001f600',
    "data: {}\n\n: comment\nretry: 1\n",
)
MODEL = 'm\r\nset-cookie: a=b\r\n\r\ndata: [DONE]\n\n\u2028"'


@pytest.fixture(scope="module")
def queue() -> Generator[tuple[RedisServer, GatewayProcess]]:
    """A queue without a worker, where any model is accepted."""
    with redis_server("valkey") as server, gateway_process(server.url) as made:
        yield server, made


def say_pieces(server: RedisServer, num_jobs: int) -> None:
    """Be the worker whose model says the pieces."""
    with server.client() as client:
        worker = HandWorker(client, incarnation=uuid4().hex)
        jobs = worker.pull()
        assert len(jobs) == num_jobs
        for job in jobs:
            for i, piece in enumerate(PIECES):
                worker.say(job, [i], piece)
            worker.say(job, [], "", end=JobState.DONE)
        worker.deregister([])


class TestGivenAModelThatSaysLinesOfAProtocol:
    def test_when_events_are_read_then_they_are_only_text(self, queue: tuple[RedisServer, GatewayProcess]) -> None:
        server, gateway = queue
        with gateway.http() as client:
            job = submitted(client, model=MODEL)
            say_pieces(server, 1)

            events = events_of(client, job)
            again = events_of(client, job, events[2].id)
            result = ended(client, job)

        texts = [event.data["text"] for event in events[: len(PIECES)]]
        assert (texts, [event.kind for event in events[len(PIECES) :]]) == ([*PIECES], ["output", "end"])
        assert [event.data["text"] for event in again[:3]] == [*PIECES[3:]]
        assert result["choices"][0]["text"] == "".join(PIECES)

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_when_a_stream_is_read_then_its_lines_are_whole(
        self, queue: tuple[RedisServer, GatewayProcess], path: str
    ) -> None:
        server, gateway = queue
        prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        body = {**prompt, "model": MODEL, "max_tokens": 20, "stream": True}

        with gateway.http() as client, client.stream("POST", path, json=body) as answer:
            say_pieces(server, 1)
            headers, data = answer.headers, answer.read()

        lines = data.decode("ascii").split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        assert lines[-2:] == ["data: [DONE]", ""]
        assert "".join(map(text_of, chunks)) == "".join(PIECES)
        assert {chunk["model"] for chunk in chunks} == {MODEL}
        assert "set-cookie" not in headers


def text_of(chunk: dict[str, Any]) -> str:
    """The text of a chunk of a stream."""
    [choice] = chunk["choices"]
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


class TestGivenHostileHeaders:
    @pytest.mark.parametrize("name", ["idempotency-key", "last-event-id", "x-request-id", "origin", "authorization"])
    @pytest.mark.parametrize("value", [b"a\tb", b"\xff\xfe", b"{x}", b"a" * 300, b"a: b"])
    def test_when_they_are_sent_then_no_answer_has_a_header_of_them(
        self, queue: tuple[RedisServer, GatewayProcess], name: str, value: bytes
    ) -> None:
        _, gateway = queue
        with gateway.http() as client:
            answer = client.post("/jobs", json={"prompt": "x", "not_before": 600}, headers=[(name.encode(), value)])

        assert answer.status_code < 500
        assert value not in b"\n".join(header for pair in answer.headers.raw for header in pair)

    def test_when_a_job_is_found_in_the_location_then_it_is_that_of_the_body(
        self, queue: tuple[RedisServer, GatewayProcess]
    ) -> None:
        _, gateway = queue
        with gateway.http() as client:
            refused: list[httpx.Response] = [
                client.post("/jobs", json={"prompt": "x", "job_id": f"0.default.x{bad}"}) for bad in "\r\n /?#{}%"
            ]

        assert {answer.status_code for answer in refused} == {400}


class TestGivenTextThatDatabasesRefuse:
    def test_when_jobs_are_listed_by_it_then_there_are_none(self, valkey: RedisServer, history_url: str) -> None:
        key = new_key(history_url, "acme")  # tests share the database, which may have keys already
        with gateway_process(valkey.url, database_url=history_url) as gateway:
            answers = [gateway.get(f"/jobs?{query}", key) for query in ("batch=%00", "after=1:%00")]

        for answer in answers:
            assert (answer.status_code, answer.json()) == (200, {"data": [], "next": None})
