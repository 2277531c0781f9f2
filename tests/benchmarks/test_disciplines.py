"""The cases of the comparison of disciplines, at toy size: they run, and what they are there to show can be seen."""

import json
from pathlib import Path

import pytest

from benchmarks.disciplines.cases import CASES
from benchmarks.disciplines.run import run, write
from benchmarks.disciplines.runs import CaseResult, table_of
from sluice.engine.simulation.figures import Figures


def by_name(result: CaseResult) -> dict[str, Figures]:
    return {one.label: one.figures for one in result.rows}


class TestGivenAQueueThatIsNeverEmpty:
    @pytest.mark.long
    def test_when_outputs_differ_in_length_then_fixed_batches_are_mostly_padding(self) -> None:
        figures = by_name(CASES["utilisation"](0.25))

        assert figures["static"].utilisation < 0.5 < figures["continuous"].utilisation
        assert figures["static"].padding > 0.3
        assert figures["continuous"].padding == 0

    def test_when_outputs_are_short_then_blocks_held_for_the_longest_stay_empty(self) -> None:
        figures = by_name(CASES["memory"](0.1))

        assert figures["continuous"].kv_waste < 0.04 < 0.5 < figures["orca"].kv_waste


class TestGivenLongPromptsAmongDecodes:
    def test_when_prompts_are_cut_then_the_longest_gap_between_tokens_is_a_fraction(self) -> None:
        figures = by_name(CASES["long-prompts"](0.1))

        assert figures["continuous"].itl_max_s < figures["prefill-first"].itl_max_s / 5


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
