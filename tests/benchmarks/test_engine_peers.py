"""Engines that ours is compared with: what is installed for them, and lookup decoding of given outputs."""

# torch's and safetensors' types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.engine.speculation import Job
from benchmarks.engine.speculation_peers import Counted, Row, ids_to_force, lines_beside, measure_beside, with_own_ids
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


class TestGivenJobsThatShareWords:
    JOBS = (Job([5, 6, 5], [6, 9]), Job([5, 7], [7, 7]))

    def test_when_each_gets_its_own_ids_then_repeats_stay_and_no_id_is_shared(self) -> None:
        own = with_own_ids(self.JOBS, range(100, 105))

        assert own == [Job([100, 101, 100], [101, 102]), Job([103, 104], [104, 104])]

    def test_when_there_are_too_few_ids_then_it_says_so(self) -> None:
        with pytest.raises(ValueError, match="4 ids are too few for 2 jobs"):
            with_own_ids(self.JOBS, range(100, 104))


class TestGivenAModelsLastMatrix:
    def test_when_another_row_is_longer_along_a_row_then_its_id_is_left_out(self, tmp_path: Path) -> None:
        rows = torch.eye(6)
        rows[4] = 2 * rows[5]
        save_file(
            {"model.embed_tokens.weight": torch.zeros(6, 6), "lm_head.weight": rows}, tmp_path / "model.safetensors"
        )

        assert ids_to_force(tmp_path) == [3, 4]


class TestGivenRunsOfTwoEngines:
    def test_when_rounds_are_measured_then_the_first_is_not_counted_and_turns_change(self) -> None:
        order: list[str] = []

        def run_of(engine: str, seconds: float, num_steps: int) -> Counted:
            order.append(engine)
            return Counted(seconds, num_steps)

        runs = {
            Row("peer", "off"): lambda: run_of("off", 4.0, 40),
            Row("peer", "lookup"): lambda: run_of("lookup", 2.0, 10),
        }

        [header, line] = lines_beside(40, measure_beside(runs, 2))

        assert order == ["lookup", "off", "off", "lookup", "lookup", "off"]
        assert header.split() == ["off", "on", "ratio", "least", "most", "tokens", "a", "step"]
        assert line.split() == ["peer,", "lookup", "10", "20", "2.00", "2.00", "2.00", "4.00"]


class TestGivenAPeerWithLookupDecoding:
    PROGRAM = """
def open_engine(work):
    return lambda prompt, output: (output[: work.num_guesses], len(prompt))
"""

    def serving(self, folder: Path, num_guesses: int) -> Serving:
        (folder / "with_stub.py").write_text(self.PROGRAM)
        work = {"model": "none", "weights": "bf16", "num_guesses": num_guesses, "jobs": [[[1, 2], [3]], [[4], [5, 6]]]}
        (folder / "work.json").write_text(json.dumps(work))
        command = [sys.executable, ENGINES / "serve_lookup.py", "stub", folder / "work.json"]
        return Serving(command, folder, {"PYTHONPATH": f"{ENGINES}:{folder}"}, folder / "stub.log")

    def test_when_it_generates_the_outputs_then_it_answers_seconds_and_steps(self, tmp_path: Path) -> None:
        with self.serving(tmp_path, 2) as peer:
            seconds, num_steps = peer.ask().split()

        assert float(seconds) >= 0
        assert num_steps == "3"

    def test_when_it_generates_anything_else_then_the_measurement_fails(self, tmp_path: Path) -> None:
        with self.serving(tmp_path, 1) as peer, pytest.raises(RuntimeError, match="did not generate the given outputs"):
            peer.ask()
