"""Engines that ours is compared with: what is installed for them, how one is served, and the table."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.engine.peers import SERVICE, table_of
from benchmarks.peers.engine_side import ENGINES, Serving, needs_of


class TestGivenAPackageThatWasInstalledAlone:
    def test_when_its_needs_are_read_then_torch_other_machines_and_extras_are_left_out(self, tmp_path: Path) -> None:
        info = tmp_path / "lib" / "python3.11" / "site-packages" / "some_engine-1.0.dist-info"
        info.mkdir(parents=True)
        needs = (
            "numpy>=2", 'six; python_version > "3"', 'older; python_version < "3"', 'plots; extra == "bench"',
            "torch==2.13.0", "torchvision",
        )  # fmt: skip
        lines = [
            "Metadata-Version: 2.1",
            "Name: some-engine",
            "Version: 1.0",
            *(f"Requires-Dist: {need}" for need in needs),
        ]
        (info / "METADATA").write_text("\n".join(lines))

        found = needs_of("some-engine", tmp_path / "bin" / "python")

        assert found == ["numpy>=2", 'six; python_version > "3"']


class TestGivenAPeerThatIsServed:
    PROGRAM = """
def open_engine(work):
    return lambda: sum(count for _, count in work.requests) - (work.weights == "short")
"""

    def serving(self, folder: Path, weights: str) -> Serving:
        (folder / "with_stub.py").write_text(self.PROGRAM)
        work = {"model": "none", "weights": weights, "max_num_seqs": 1, "max_num_batched_tokens": 8}
        (folder / "work.json").write_text(json.dumps(work | {"requests": [[[1, 2], 3], [[4], 5]]}))
        command = [sys.executable, ENGINES / "serve.py", "stub", folder / "work.json"]
        return Serving(command, folder, {"PYTHONPATH": f"{ENGINES}:{folder}"}, folder / "stub.log")

    def test_when_it_generates_all_tokens_then_it_answers_seconds_each_time(self, tmp_path: Path) -> None:
        with self.serving(tmp_path, "bf16") as peer:
            seconds = [peer.run_s() for _ in range(2)]

        assert min(seconds) >= 0

    def test_when_it_generates_fewer_then_the_measurement_fails(self, tmp_path: Path) -> None:
        with self.serving(tmp_path, "short") as peer, pytest.raises(RuntimeError, match="7 tokens instead of 8"):
            peer.run_s()


class TestGivenRounds:
    def test_when_they_are_printed_then_ratios_are_those_within_a_round(self) -> None:
        rounds = [
            {(SERVICE, 0): 100.0, (SERVICE, 1): 50.0, ("peer", 0): 50.0, ("peer", 1): 40.0},
            {(SERVICE, 0): 80.0, (SERVICE, 1): 60.0, ("peer", 0): 20.0, ("peer", 1): 10.0},
            {(SERVICE, 0): 90.0, (SERVICE, 1): 45.0, ("peer", 0): 30.0, ("peer", 1): 15.0},
        ]

        rows = [line.split("  ") for line in table_of(rounds, [0, 1]).splitlines()]

        peer_quiet, peer_busy = ([cell.strip() for cell in row if cell.strip()] for row in rows[3:])
        assert peer_quiet == ["peer", "0", "30", "20", "50", "3.00", "1.00"]
        assert peer_busy == ["peer", "1", "15", "10", "40", "3.00", "0.50"]
