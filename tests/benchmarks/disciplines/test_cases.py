"""The cases of the comparison of disciplines, at toy size: they run and print."""

import pytest

from benchmarks.disciplines.cases import CASES
from benchmarks.disciplines.run import print_case
from benchmarks.disciplines.runs import table_of


class TestGivenACaseThatWasRun:
    def test_when_it_is_printed_then_its_table_and_claims_are_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        result = CASES["memory"](0.05)

        print_case(result)

        printed = capsys.readouterr().out
        assert table_of(result.rows) in printed
        assert all(claim.what in printed for claim in result.claims)

    @pytest.mark.long
    @pytest.mark.parametrize("name", ["capacity", "goodput"])
    def test_when_rates_are_tried_then_each_discipline_is_compared(self, name: str) -> None:
        assert len(CASES[name](0.1).claims) == 5
