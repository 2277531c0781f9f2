"""`producer submit` once more: on another server, after a failure, and while the first still runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.producer.commands import Run
from tests.servers import RedisServer, redis_server

OTHER = "was submitted to another server, or this one has lost its data"


@pytest.fixture(autouse=True)
def _file(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')


class TestGivenAFileThatWasSubmitted:
    """To the server of the fixture `run`."""

    @pytest.fixture
    def other(self) -> Iterator[RedisServer]:
        """Another server."""
        with redis_server() as server:
            yield server

    def test_when_it_is_submitted_to_another_server_then_all_lines_are(self, run: Run, other: RedisServer) -> None:
        first = run("submit", "in.jsonl")

        elsewhere = [run("submit", "in.jsonl", "--redis-url", other.url) for _ in range(2)]
        back = run("submit", "in.jsonl")

        assert "2 jobs submitted, 0 submitted before" in elsewhere[0].err
        assert "0 jobs submitted, 2 submitted before" in elsewhere[1].err
        assert "0 jobs submitted, 2 submitted before" in back.err
        assert [OTHER in one.err for one in (first, *elsewhere, back)] == [False, True, False, False]
        with other.client() as client:
            assert client.hget("{default:0}:counters", "submitted") == b"2"

    def test_when_the_server_loses_its_data_then_all_lines_are_submitted(self, run: Run, valkey: RedisServer) -> None:
        run("submit", "in.jsonl")
        with valkey.client() as client:
            client.flushall()

        ended = run("submit", "in.jsonl")

        assert "2 jobs submitted, 0 submitted before" in ended.err
        assert OTHER in ended.err

    def test_when_the_server_restarts_then_none_is_submitted_again(self, run: Run, durable_valkey: RedisServer) -> None:
        run("submit", "in.jsonl", "--redis-url", durable_valkey.url)
        durable_valkey.kill()
        durable_valkey.start()

        ended = run("submit", "in.jsonl", "--redis-url", durable_valkey.url)

        assert "0 jobs submitted, 2 submitted before" in ended.err
