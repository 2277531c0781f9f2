"""What `producer submit` says of lines and jobs that fail: real processes on a real server."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from sluice.protocol.states import JobState
from tests.producer.commands import run_producer
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

ROOT = Path(__file__).parent.parent.parent.parent


@contextmanager
def failing_worker(server: RedisServer) -> Generator[None]:
    """A worker that serves another model than every job asks for."""
    stop = threading.Event()

    def loop() -> None:
        with server.client() as client:
            worker = HandWorker(client)
            while not stop.wait(0.005):
                for leased in worker.pull():
                    worker.say(leased, [], "", end=JobState.FAILED, error="serves small", code="model_mismatch")

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class TestGivenAFileWhoseJobsFail:
    @pytest.mark.parametrize("has_output", [True, False])
    def test_when_it_has_run_then_reasons_files_and_the_next_step_are_told(
        self, valkey: RedisServer, tmp_path: Path, has_output: bool
    ) -> None:
        lines = [json.dumps({"prompt": f"p{i}"}) for i in range(5)]
        (tmp_path / "in.jsonl").write_text("\n".join([*lines, "{nonsense"]) + "\n")

        with failing_worker(valkey):
            done = run_producer(valkey, tmp_path, "submit", "in.jsonl", "--wait", *["-o", "out.jsonl"] * has_output)

        assert done.returncode == 1
        lines = done.stderr.splitlines()
        assert any(line.startswith("5 x model_mismatch, for example line ") for line in lines), lines
        assert any(line.startswith("1 x invalid_json, for example line 6: ") for line in lines), lines
        assert ("Outputs: out.jsonl" in lines, "Errors: out.jsonl.errors.jsonl" in lines) == (has_output, has_output)
        assert "--again" in lines[-1]

    def test_when_more_lines_are_bad_than_are_shown_then_the_rest_is_counted(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        (tmp_path / "in.jsonl").write_text("{\n" * 11)

        done = run_producer(valkey, tmp_path, "submit", "in.jsonl")

        assert "and 1 more" in done.stderr.splitlines()

    def test_when_only_lines_are_bad_then_no_job_is_to_be_requeued(self, valkey: RedisServer, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_text("{\n")

        done = run_producer(valkey, tmp_path, "submit", "in.jsonl", "--wait")

        assert "To try again, correct the lines" in done.stderr
        assert "requeue" not in done.stderr


class TestGivenAFileThatCannotBeUsed:
    @pytest.mark.parametrize("output", ["-", "/dev/stdout"])
    def test_when_the_output_is_no_file_then_it_is_misuse_and_nothing_is_created(
        self, valkey: RedisServer, tmp_path: Path, output: str
    ) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')

        done = run_producer(valkey, tmp_path, "submit", "in.jsonl", "--wait", "-o", output)

        assert done.returncode == 2
        assert "not a regular file" in done.stderr
        assert not (tmp_path / "-").exists()

    def test_when_the_input_is_missing_then_it_is_misuse(self, valkey: RedisServer, tmp_path: Path) -> None:
        done = run_producer(valkey, tmp_path, "submit", "missing.jsonl")

        assert done.returncode == 2
        assert "there is no file 'missing.jsonl'" in done.stderr


class TestGivenNoCommand:
    def test_when_the_version_is_asked_then_it_is_that_of_the_distribution(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        assert run_producer(valkey, tmp_path, "--version").stdout == f"producer, version {version('sluice-llm')}\n"


class TestGivenAnUnknownJob:
    def test_when_it_is_shown_then_the_missing_history_is_named(self, valkey: RedisServer, tmp_path: Path) -> None:
        done = run_producer(valkey, tmp_path, "jobs", "show", "0.default.nobody")

        assert done.returncode == 1
        assert "there is no job history at" in done.stderr
        assert "producer jobs show" not in done.stderr
