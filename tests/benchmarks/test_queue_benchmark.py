"""The queue's benchmark counts what it says it counts, at toy sizes and without peers."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import environments
from benchmarks.peers.environments import Recipe
from benchmarks.peers.queue_side import QUEUES, RECIPES, RECORD, Bench
from benchmarks.queue.calls import fill, rows
from benchmarks.queue.ours import Drained, drain, stream
from benchmarks.queue.peers import median
from benchmarks.queue.wakes import wakes_ms
from tests.protocol.driving import Queue
from tests.protocol.test_cost_grid import CALLS, crowd_of
from tests.servers import RedisServer


class TestGivenOurQueue:
    @pytest.mark.slow
    def test_when_a_few_jobs_are_drained_then_each_is_counted_once(self) -> None:
        found = drain(50)

        assert found.submitted_per_s > 0
        assert found.done_per_s > 0
        # A job is written, leased and ended; a poll of ours that went round a hundred times would show here.
        assert 5 < found.commands_per_job < 60
        assert found.recorded_per_s is None

    @pytest.mark.slow
    def test_when_each_script_is_called_then_the_server_says_how_long_it_took(self, valkey: RedisServer) -> None:
        with valkey.client() as client:
            queue = Queue(client)
            fill(queue, 300)

            found = list(rows(crowd_of(queue, 20), 1))

        assert [row[0] for row in found[1:]] == list(CALLS)
        assert all(0 < float(str(row[2])) < 1000 for row in found[1:])

    @pytest.mark.slow
    def test_when_jobs_wake_a_worker_then_each_has_the_time_that_it_took(self) -> None:
        taken_ms = wakes_ms(3)

        assert len(taken_ms) == 3
        assert 0 < taken_ms[0] <= taken_ms[-1]

    @pytest.mark.slow
    def test_when_jobs_stream_then_all_tokens_arrive(self) -> None:
        found = stream(2, 0.0, tokens=3, model="null")

        assert found.tokens_per_s > 0
        assert found.server_us_per_token > 0


class TestGivenALedger:
    """What peers' jobs write: 16 bytes of name, and a time."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Bench:
        server: Any = SimpleNamespace(folder=tmp_path, url="unix:///nowhere")  # only these are looked at
        (tmp_path / "ledger").write_bytes(
            RECORD.pack(b"k000000000000001", 5) * 2 + RECORD.pack(b"w000000000000001", 6) + b"half"
        )
        return Bench(RECIPES["huey"], server)

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


class TestGivenAPeer:
    def test_when_it_is_driven_then_names_have_sixteen_characters_and_times_come_back(self, tmp_path: Path) -> None:
        (tmp_path / "with_stub.py").write_text(
            "import ledger\ndef enqueue(names):\n    for name in names: ledger.record(name)\n"
        )
        ledger = tmp_path / "ledger"
        environ = {"PYTHONPATH": f"{tmp_path}:{QUEUES}", "PEER_LEDGER": str(ledger)}

        said = environments.ask([sys.executable, "drive.py", "stub", "enqueue", "2", "d"], environ, QUEUES)

        assert said.keys() == {"seconds", "processor_s"}
        assert [name for name, _ in RECORD.iter_unpack(ledger.read_bytes())] == [b"d%015d" % i for i in range(2)]


class TestGivenRuns:
    def test_when_the_median_is_taken_then_each_figure_is_looked_at_by_itself(self) -> None:
        def run(speed: float, server_us: float) -> Drained:
            return Drained(
                submitted_per_s=1, done_per_s=speed, client_us_per_submit=1, server_us_per_submit=1,
                commands_per_job=1, server_us_per_job=server_us, worker_us_per_job=1,
            )  # fmt: skip

        found = median([run(1, 30), run(2, 10), run(3, 20)])

        assert (found.done_per_s, found.server_us_per_job, found.recorded_per_s) == (2, 20, None)
