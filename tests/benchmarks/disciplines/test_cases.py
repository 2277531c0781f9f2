"""The cases of the comparison of disciplines, at toy size: they run, print and are drawn."""

import json
from pathlib import Path

import pytest

from benchmarks.disciplines.cases import CASES
from benchmarks.disciplines.run import run, write
from benchmarks.disciplines.runs import table_of


class TestGivenCasesThatWereRun:
    @pytest.mark.long
    def test_when_they_are_written_then_machines_find_the_figures_and_people_small_plots(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        results = run(["arrivals", "memory"], 0.05)

        write(results, tmp_path)

        tree = json.loads((tmp_path / "disciplines.json").read_text())
        assert tree["memory"]["rows"][-1]["label"] == "continuous"
        assert {path.name for path in tmp_path.iterdir()} == {"disciplines.json", "memory.png", "memory.svg"}
        assert 0 < (tmp_path / "memory.svg").stat().st_size < 200_000
        assert table_of(results[1].rows) in capsys.readouterr().out

    @pytest.mark.long
    @pytest.mark.parametrize("name", ["capacity", "goodput", "split"])
    def test_when_rates_are_tried_then_ours_bears_the_most(self, name: str) -> None:
        result = CASES[name](0.1)

        best = {curve.label: max(good for _, good in curve.points) for curve in result.curves}
        assert max(best.values()) > 0
        assert result.claims
