"""Options that are a time: with a unit, or in seconds."""

from collections.abc import Iterator

import click
import pytest

from sluice.gateway.settings import SETTINGS
from sluice.producer.cli.durations import duration_s, duration_with_unit_s
from sluice.producer.cli.main import cli
from sluice.protocol.settings import TIME
from tests.producer.commands import Run
from tests.rules.commands import below

IN_SECONDS = {"--ttft-target", "--tpot-target"}
"""Of fractions of a second."""

OF_GATEWAY = {one.flag for one in SETTINGS if one.metavar == TIME}
"""`Declared.read` converts their text."""


def times(command: click.Command) -> Iterator[click.Option]:
    """The options of a command and of those below it that are a time."""
    for option in command.params:
        if isinstance(option, click.Option) and (
            option.metavar in ("TIME", "SECONDS") or str(option.name)[-2:] == "_s"
        ):
            yield option
    for one in below(command).values():
        yield from times(one)


class TestGivenATime:
    @pytest.mark.parametrize(
        ("text", "seconds"),
        [("0", 0), ("45", 45), ("0.5", 0.5), ("45s", 45), ("1.5m", 90), ("12h", 43_200), ("2d", 172_800)],
    )
    def test_when_it_is_read_then_it_is_in_seconds(self, text: str, seconds: float) -> None:
        assert duration_s(text) == seconds

    @pytest.mark.parametrize("text", ["", "soon", "-1", "inf", "5w", "1h30m", "99999d"])
    def test_when_it_is_none_then_it_is_refused(self, text: str) -> None:
        with pytest.raises(click.BadParameter, match="expected a time such as 90d, 12h, 30m, 45s or 45, got"):
            duration_s(text)


class TestGivenAllOptionsThatAreATime:
    def test_when_they_are_listed_then_each_takes_units(self) -> None:
        parsers = (duration_s, duration_with_unit_s)
        taken = {option.opts[0]: getattr(option.type, "func", None) for option in times(cli)}

        assert {name for name, parser in taken.items() if parser not in parsers} == IN_SECONDS | OF_GATEWAY

    def test_when_one_is_wrong_then_one_sentence_says_so(self, run: Run) -> None:
        ended = run("ask", "hi", "--timeout", "soon")

        assert (ended.code, "'--timeout': expected a time such as 90d" in ended.err) == (2, True), ended
