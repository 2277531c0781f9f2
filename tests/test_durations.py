"""How long tests took, by folder and by test."""

from pathlib import Path

from tests.durations import BUDGETS_S, NUM_SLOWEST, Cost, lines_of


class TestGivenDurationsOfTests:
    def test_when_they_are_written_then_folders_have_sums_and_the_slowest_come_first(self) -> None:
        costs = {"tests/a/b/test_x.py::test_1": Cost(1.0, 0.5, 1), "tests/a/test_y.py::test_2[/]": Cost(2.5, 4.0, 1)}

        lines = [line.split() for line in lines_of(costs)]

        assert lines == [
            ["3.5", "s", "4.5", "processor-s", "2", "tests", "tests"],
            ["3.5", "s", "4.5", "processor-s", "2", "tests", "tests/a"],
            ["1.0", "s", "0.5", "processor-s", "1", "tests", "tests/a/b"],
            [],
            ["2.5", "s", "4.0", "processor-s", "tests/a/test_y.py::test_2[/]"],
            ["1.0", "s", "0.5", "processor-s", "tests/a/b/test_x.py::test_1"],
        ]

    def test_when_there_are_many_tests_then_only_the_slowest_are_listed(self) -> None:
        lines = list(lines_of({f"tests/test_x.py::test_{n}": Cost(float(n)) for n in range(NUM_SLOWEST + 1)}))

        assert lines[-1].endswith("::test_1")

    def test_when_a_folder_is_over_its_budget_then_its_line_says_so(self) -> None:
        folder, budget_s = "tests/gateway", BUDGETS_S["tests/gateway"]

        [_, within, *_] = lines_of({f"{folder}/test_x.py::test_1": Cost(1.0, budget_s, 1)})
        [_, over, *_] = lines_of({f"{folder}/test_x.py::test_1": Cost(1.0, budget_s + 1, 1)})

        assert within.endswith(folder)
        assert over.endswith(f"{folder}  OVER ITS BUDGET of {budget_s} processor-s")

    def test_when_a_folder_has_tests_then_it_has_a_budget(self) -> None:
        here = Path(__file__).parent

        folders = {path.relative_to(here.parent).parts[1] for path in here.glob("*/**/test_*.py")}

        assert {f"tests/{folder}" for folder in folders} == BUDGETS_S.keys()
