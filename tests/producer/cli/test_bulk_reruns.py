"""`producer submit` once more: on another server, after a failure, and while the first still runs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.producer import Producer
from tests.producer.cli.test_commands import rows, working
from tests.producer.commands import Run
from tests.servers import RedisServer, redis_server

OTHER = "was submitted to another server, or this one has lost its data"
WAIT = ("submit", "in.jsonl", "--wait", "-o", "out.jsonl")


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
            assert client.hget("{default:0}:2:counters", "submitted") == b"2"

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


class TestGivenABatchThatWasBegunOnOnePartition:
    """Of 32 lines. A crash kept all but the first four out of the journal."""

    @pytest.fixture(autouse=True)
    def _journal(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "p{number}"}}\n' for number in range(32)))
        run("submit", "in.jsonl").output()
        [journal] = (tmp_path / "state").rglob("*.journal")
        journal.write_text("".join(journal.read_text().splitlines(keepends=True)[: 2 + 4 * 2]))

    def serve(self, server: RedisServer, partitions: int) -> None:
        """State a number of partitions, as workers do when they start."""
        with server.client() as client:
            client.hset("{default:0}:2:config", "partitions", partitions)

    def test_when_workers_serve_more_then_no_line_is_submitted_twice(
        self, run: Run, valkey: RedisServer, tmp_path: Path
    ) -> None:
        self.serve(valkey, 4)

        first = run("submit", "in.jsonl")
        assert "0 jobs submitted, 32 submitted before" in first.err
        with working(valkey):
            second = run(*WAIT)

        assert (second.code, len(rows(tmp_path / "out.jsonl"))) == (0, 32), second

    def test_when_it_runs_again_on_more_then_it_uses_all_of_them_until_they_are_fewer(
        self, run: Run, valkey: RedisServer
    ) -> None:
        self.serve(valkey, 4)
        run("submit", "in.jsonl", "--again").output()
        with valkey.client() as client:
            counts = [client.hget(f"{{default:{partition}}}:2:counters", "submitted") for partition in range(4)]
        self.serve(valkey, 2)

        fewer = run("submit", "in.jsonl")

        assert all(counts)
        assert (fewer.code, "was begun on 4 partitions of queue 'default', which has 2 now" in fewer.err) == (2, True)


class TestGivenAnOutputOfAnEarlierRun:
    """And its file of errors."""

    @pytest.fixture
    def before(self, run: Run, valkey: RedisServer, tmp_path: Path) -> list[str]:
        """What both files have."""
        with (tmp_path / "in.jsonl").open("a") as file:
            file.write("{nonsense\n")
        with working(valkey):
            run(*WAIT)
        return self.content(tmp_path)

    def content(self, folder: Path) -> list[str]:
        """What both files have, none of them nothing."""
        found = [(folder / name).read_text() for name in ("out.jsonl", "out.jsonl.errors.jsonl")]
        assert all(found)
        return found

    @pytest.mark.parametrize(
        "why", [("--redis-url", "unix:///nowhere"), ("--strict",), ("--durability", "aof")], ids=lambda why: why[0]
    )
    def test_when_running_it_again_is_refused_then_they_stay(
        self, run: Run, before: list[str], tmp_path: Path, why: tuple[str, ...]
    ) -> None:
        assert run(*WAIT, "--again", *why).code == 1

        assert self.content(tmp_path) == before

    def test_when_running_it_again_was_refused_then_the_next_run_continues_the_old_one(
        self, run: Run, before: list[str], valkey: RedisServer, tmp_path: Path
    ) -> None:
        run(*WAIT, "--again", "--strict")

        with working(valkey):
            ended = run(*WAIT)

        assert "0 jobs submitted, 2 submitted before" in ended.err
        assert self.content(tmp_path) == before

    def test_when_it_runs_again_then_they_have_the_new_run_only(
        self, run: Run, before: list[str], valkey: RedisServer, tmp_path: Path
    ) -> None:
        with working(valkey):
            run(*WAIT, "--again")

        outputs, errors = (rows(tmp_path / name) for name in ("out.jsonl", "out.jsonl.errors.jsonl"))
        assert sorted(line["custom_id"] for line in outputs) == ["line-1", "line-2"]
        assert not {line["id"] for line in outputs} & {line["id"] for line in map(json.loads, before[0].splitlines())}
        assert len(errors) == 1


class TestGivenARunThatWaits:
    """In a process of its own, for results that do not come."""

    @pytest.fixture
    def waiting(self, run: Run, producer: Producer, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
        """The process, once its jobs are in the queue."""
        command = [sys.executable, "-P", "-m", "sluice.producer", *WAIT, "--batch", "b"]
        with subprocess.Popen(command, cwd=tmp_path, env=os.environ, stderr=subprocess.DEVNULL) as process:
            while producer.queue()[0].waiting_jobs < 2:
                assert process.poll() is None
            yield process
            process.send_signal(signal.SIGKILL)

    def test_when_it_is_submitted_at_the_same_time_then_the_process_is_named(
        self, run: Run, waiting: subprocess.Popen[bytes]
    ) -> None:
        ended = run(*WAIT, "--batch", "b")

        assert ended.code == 1
        assert f"process {waiting.pid} on " in ended.err
        assert "run the same command again" in ended.err

    def test_when_another_batch_has_the_same_output_then_it_is_refused(
        self, run: Run, waiting: subprocess.Popen[bytes], producer: Producer
    ) -> None:
        ended = run(*WAIT, "--batch", "other")

        assert ended.code == 1
        assert "out.jsonl" in ended.err
        assert producer.queue()[0].waiting_jobs == 2

    def test_when_it_is_killed_then_the_next_run_writes_each_result_once(
        self, run: Run, waiting: subprocess.Popen[bytes], valkey: RedisServer, tmp_path: Path
    ) -> None:
        waiting.kill()
        waiting.wait()

        with working(valkey):
            ended = run(*WAIT, "--batch", "b")

        assert ended.code == 0
        assert sorted(line["custom_id"] for line in rows(tmp_path / "out.jsonl")) == ["line-1", "line-2"]
