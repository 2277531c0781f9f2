"""Prices from the command line."""

import json

import pytest

from sluice.producer.cli.main import main

ONE = ["prices", "set", "small", "--input", "0.5", "--output", "1.5"]


def run(arguments: list[str], url: str) -> int:
    """Run the command line, and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--database-url", url])
    return int(ended.value.code or 0)


class TestGivenAHistory:
    def test_when_a_price_is_set_again_then_the_last_one_is_listed(
        self, sqlite_url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(ONE, sqlite_url) == 0
        assert (
            run([*ONE[:3], "--input", "2", "--cached", "0.25", "--output", "4", "--currency", "EUR"], sqlite_url) == 0
        )
        capsys.readouterr()

        assert run(["prices", "list", "--json"], sqlite_url) == 0

        [price] = json.loads(capsys.readouterr().out)
        assert [price[name] for name in ("model", "input", "cached", "output", "currency")] == [
            "small",
            2,
            0.25,
            4,
            "EUR",
        ]

    def test_when_nothing_is_said_of_cached_tokens_then_they_cost_as_others(
        self, sqlite_url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(ONE, sqlite_url)
        capsys.readouterr()

        run(["prices", "list"], sqlite_url)

        assert "0.5" in capsys.readouterr().out

    @pytest.mark.parametrize("wrong", [["--currency", "euro"], ["--input", "-1"], ["--output", "many"]])
    def test_when_a_value_is_wrong_then_it_is_a_misuse(self, sqlite_url: str, wrong: list[str]) -> None:
        assert run([*ONE, *wrong], sqlite_url) == 2
