"""Every figure that the documents give for a discipline in virtual time is the one that the code computes.

Virtual time is deterministic, so a difference is a change of a scheduler, of a case or of the document. It uses
`python -m benchmarks disciplines`, and so of the engine only its settings and its replays.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from benchmarks.disciplines.arrivals import geometric, poisson, uniform
from benchmarks.disciplines.cases import CASES
from benchmarks.disciplines.figures import Figures
from benchmarks.disciplines.runs import CaseResult, Machine, simulated
from sluice.engine.config import DISCIPLINE_NAMES

DOCUMENTS = Path(__file__).parents[3] / "docs"
LAB = (DOCUMENTS / "lab/disciplines.md").read_text(encoding="utf-8")
SUMMARY = (DOCUMENTS / "explanation/disciplines.md").read_text(encoding="utf-8")


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.1f}"


def longest_gap(figures: Figures) -> str:
    return f"{ms(figures.itl_max_s)} ms"


def share(part: float) -> str:
    return f"{part:.0%}".replace("%", " %") if part else "0"


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "tokens/s": lambda f: f"{f.output_tokens_per_s:,.0f}",
    "TTFT p50 s": lambda f: f"{f.ttft_p50_s:.1f}",
    "TTFT p99 ms": lambda f: ms(f.ttft_p99_s),
    "TPOT ms": lambda f: ms(f.tpot_mean_s),
    "ITL p50": lambda f: ms(f.itl_p50_s),
    "ITL p99 ms": lambda f: ms(f.itl_p99_s),
    "ITL max ms": lambda f: ms(f.itl_max_s),
    "occupancy": lambda f: share(f.occupancy),
    "padding": lambda f: share(f.padding),
    "wasted": lambda f: f"{f.kv_waste:.1%}".replace("%", " %"),
    "preemptions": lambda f: f"{f.num_preemptions}",
}
"""How the documents write a figure, by the head of its column."""


SUMMARIES: dict[str, dict[str, Callable[[Figures], str]]] = {
    "utilisation": {"tokens/s": COLUMNS["tokens/s"], "slots held but empty": COLUMNS["wasted"]},
    "long-prompts": {"longest gap": longest_gap},
}
"""What the summary gives of a case: how a row begins, and how it writes a figure."""


def cells_of(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]


def table_after(text: str, mark: str) -> list[list[str]]:
    """Return the cells of the first table after `mark`, its head first, without the rule below the head."""
    lines = text[text.index(mark) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    last = next(number for number, line in enumerate(lines) if number > first and not line.startswith("|"))
    return [cells_of(line) for line in lines[first:last] if not line.startswith("|---")]


def summary_of(row: str) -> dict[str, str]:
    """Return the figure of each discipline in the row of the summary that begins so."""
    head, *rows = table_after(SUMMARY, "## What it gains")
    [figures] = [line for line in rows if line[0].startswith(row)]
    return dict(zip(head[1:], figures[1:], strict=True))


def numbers_of(text: str) -> list[str]:
    return re.findall(r"[-+]?\d[\d,.]*\d|[-+]?\d", text.replace("->", " "))


def documented_claims() -> list[list[str]]:
    return [numbers_of(line[-1]) for line in table_after(LAB, "## The published figures")]


def claims_not_in(documented: list[list[str]], result: CaseResult) -> list[str]:
    return [claim.measured for claim in result.claims if numbers_of(claim.measured) not in documented]


def case(name: str) -> ParameterSet:
    takes_long = name != "arrivals"
    return pytest.param(name, marks=[pytest.mark.long, pytest.mark.timeout(600)] if takes_long else [])


class TestGivenTheFiguresOfTheDocuments:
    @pytest.mark.parametrize("name", [case("utilisation"), case("memory"), case("long-prompts")])
    def test_when_a_case_is_run_then_its_tables_and_claims_are_those_documented(self, name: str) -> None:
        head, *documented = table_after(LAB, f"`--case {name}`:")

        result = CASES[name](1.0)

        computed = {one.label: [COLUMNS[column](one.figures) for column in head[1:]] for one in result.rows}
        assert {label: figures for label, *figures in documented} == computed
        assert claims_not_in(documented_claims(), result) == []
        for row, text in SUMMARIES.get(name, {}).items():
            by_name = {one.label: text(one.figures) for one in result.rows}
            assert summary_of(row) == {label: by_name[label] for label in summary_of(row)}

    @pytest.mark.parametrize("name", [case("arrivals"), case("poisson"), case("capacity")])
    def test_when_a_case_is_run_then_its_claims_are_those_documented(self, name: str) -> None:
        documented = documented_claims()

        result = CASES[name](1.0)

        assert claims_not_in(documented, result) == []

    @pytest.mark.long
    @pytest.mark.timeout(600)
    def test_when_rates_are_tried_then_the_best_goodput_is_that_documented(self) -> None:
        documented = summary_of("best goodput")

        result = CASES["goodput"](1.0)

        pairs = [(claim.what.split()[2], *numbers_of(claim.measured)) for claim in result.claims]
        best = {name: good for name, good, _ in pairs} | {"continuous": pairs[0][2]}
        assert documented == {label: f"{best[label]}/s" for label in documented}


class TestGivenTheSameArrivals:
    """More requests than fit, so that sequences wait in every discipline and are preempted in some."""

    arrivals = poisson(50.0, 60, uniform(16, 256), geometric(64, most=400), max_tokens=400)
    machine = Machine(num_blocks=128, max_model_len=1024, max_num_seqs=16, budget=256)

    def test_when_each_discipline_serves_them_then_all_give_the_same_tokens(self) -> None:
        replays = {name: simulated(name, self.machine, self.arrivals) for name in DISCIPLINE_NAMES}

        tokens = {name: [one.token_ids for one in replay.completed] for name, replay in replays.items()}

        assert replays["continuous"].replay.num_preemptions > 0
        assert [len(one) for one in tokens["continuous"]] == [one.num_output_tokens for one in self.arrivals]
        assert all(one == tokens["continuous"] for one in tokens.values())
        assert len({tuple(one) for one in tokens["continuous"]}) > 50
