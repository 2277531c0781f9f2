"""The queue's benchmark counts what it says it counts, at toy sizes and without peers."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import environments
from benchmarks.peers.environments import Recipe
from benchmarks.peers.queue_side import QUEUES, RECIPES, RECORD, Bench
from benchmarks.queue import ours as queue_ours
from benchmarks.queue import streams as queue_streams
from benchmarks.queue.figures import Drained
from benchmarks.queue.peers import median

ROOT = Path(__file__).parent.parent.parent


class TestGivenOurQueue:
    @pytest.mark.slow
    def test_when_a_few_jobs_are_drained_then_each_is_counted_once(self) -> None:
        found = queue_ours.drain(50)

        assert found.submitted_per_s > 0
        assert found.done_per_s > 0
        # A job is written, leased and ended; a poll of ours that went round a hundred times would show here.
        assert 5 < found.commands_per_job < 60
        assert found.recorded_per_s is None

    @pytest.mark.slow
    def test_when_an_idle_worker_is_woken_then_each_job_has_its_time(self) -> None:
        found = queue_ours.wakes_ms(2)

        assert len(found) == 2
        assert all(0 < ms < 20_000 for ms in found)

    @pytest.mark.slow
    def test_when_jobs_stream_over_a_slow_link_then_all_tokens_arrive(self) -> None:
        found = queue_streams.stream(2, 0.0, tokens=3, delay_s=0.001, model="null")

        assert found.tokens_per_s > 0
        assert found.server_us_per_token > 0


class TestGivenALinkThatDelays:
    def test_when_pieces_are_sent_at_once_then_they_come_later_and_in_order(self, tmp_path: Path) -> None:
        listen, target = tmp_path / "a", tmp_path / "b"
        command = [sys.executable, "-m", "benchmarks.queue.slow_link", str(listen), str(target), "0.1"]
        with socket.socket(socket.AF_UNIX) as server, subprocess.Popen(command, cwd=ROOT) as link:
            server.bind(str(target))
            server.listen()
            try:
                with socket.socket(socket.AF_UNIX) as near:
                    _connect(near, listen)
                    far, _ = server.accept()
                    began_s = time.monotonic()
                    near.sendall(b"one")
                    near.sendall(b"two")
                    with far:
                        far.settimeout(10)
                        came = b""
                        while len(came) < len(b"onetwo"):
                            came += far.recv(100)
                            # A clock's resolution early, at most.
                            assert time.monotonic() - began_s >= 0.09
            finally:
                link.kill()

        assert came == b"onetwo"


class TestGivenALedger:
    """What peers' jobs write: 16 bytes of name, and a time."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Bench:
        server: Any = SimpleNamespace(folder=tmp_path, url="unix:///nowhere")  # only these are looked at
        (tmp_path / "ledger").write_bytes(
            RECORD.pack(b"k000000000000001", 5) * 2 + RECORD.pack(b"w000000000000001", 6) + b"half"
        )
        return Bench(RECIPES["rq"], server)

    def test_when_it_is_read_then_each_execution_of_the_prefix_is_there_and_none_is_cut(self, bench: Bench) -> None:
        assert bench.ran("k") == [("k000000000000001", 5)] * 2

    def test_when_a_job_ran_twice_then_it_counts_as_one_that_ran(self, bench: Bench) -> None:
        assert bench.wait_for(1, "k", 0)
        assert not bench.wait_for(2, "k", 0)


class TestGivenARecipe:
    def test_when_it_changes_then_its_environment_is_no_longer_the_one_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BENCHMARK_PEERS_DIR", str(tmp_path))
        recipe = Recipe(name="nothing", installs=())
        environments.python_of(recipe)

        assert environments.is_installed(recipe)
        assert not environments.is_installed(replace(recipe, installs=(("something",),)))

    def test_when_a_program_fails_then_its_last_output_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="it broke"):
            environments.ask([sys.executable, "-c", "raise SystemExit('it broke')"], os.environ, tmp_path)


class TestGivenAPeerThatRunsNothing:
    """Its jobs are taken and never run."""

    def test_when_an_idle_worker_is_to_be_woken_then_the_measurement_fails(self, tmp_path: Path) -> None:
        (tmp_path / "with_deaf.py").write_text("def open_single():\n    return lambda name: None\n")
        (tmp_path / "ledger").write_bytes(b"")
        environ = {"PYTHONPATH": str(tmp_path), "PEER_LEDGER": str(tmp_path / "ledger"), "PEER_GIVE_UP_S": "0.1"}

        with pytest.raises(RuntimeError, match=r"a job that was submitted did not run within 0\.1 s"):
            environments.ask([sys.executable, "drive.py", "deaf", "wake", "1", "i"], environ, QUEUES)


class TestGivenRuns:
    def test_when_the_median_is_taken_then_each_figure_is_looked_at_by_itself(self) -> None:
        def run(speed: float, server_us: float) -> Drained:
            return Drained(
                submitted_per_s=1, done_per_s=speed, client_us_per_submit=1, server_us_per_submit=1,
                commands_per_job=1, server_us_per_job=server_us, worker_us_per_job=1,
            )  # fmt: skip

        found = median([run(1, 30), run(2, 10), run(3, 20)])

        assert (found.done_per_s, found.server_us_per_job, found.recorded_per_s) == (2, 20, None)


def _connect(near: socket.socket, listen: Path) -> None:
    """As soon as somebody listens there: the path is there a moment before."""
    deadline_s = time.monotonic() + 10
    while True:
        try:
            return near.connect(str(listen))
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.005)
