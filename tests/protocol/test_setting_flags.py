"""The flags of settings, as a command gets them."""

from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from sluice.protocol.settings import flag_of, setting, settings_of


@dataclass(frozen=True)
class _Section:
    words: tuple[str, ...] = setting((), help="Some words.")


class TestGivenASettingWithSeveralValues:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [([], "None"), (["--words", "one"], "('one',)"), (["--words", "one", "--words", "two"], "('one', 'two')")],
    )
    def test_when_its_flag_is_not_given_then_it_hides_no_other_source(
        self, arguments: list[str], expected: str
    ) -> None:
        [declared] = settings_of("section", _Section)

        @click.command()
        @flag_of(declared, "words")
        def command(words: object) -> None:
            click.echo(repr(words))

        assert CliRunner().invoke(command, arguments).output.strip() == expected
