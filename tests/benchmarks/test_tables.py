"""The printer of tables."""

from benchmarks.tables import table


class TestGivenRows:
    def test_when_they_are_printed_then_names_are_left_figures_right_and_no_line_ends_in_blanks(self) -> None:
        assert table([("", "us"), ("one", 5), ("fourteen", 1234), ("none", "")]).splitlines() == [
            "            us",
            "one          5",
            "fourteen  1234",
            "none",
        ]
