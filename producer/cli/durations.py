"""The type of options that are a time."""

import click

from sluice.protocol.settings import seconds


def duration_s(text: str) -> float:
    """Return the seconds of a time such as 90d, 12h, 30m, 45s or 45.

    Raises:
        click.BadParameter: it is not a time, or over a century.
    """
    try:
        return seconds(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


TIME = click.types.FuncParamType(duration_s)
TIME.name = "time"


def duration_with_unit_s(text: str) -> float:
    """Return the seconds of a time that names its unit, where a bare number would be mistaken: 90 is not 90 days.

    Raises:
        click.BadParameter: it names none, or as `duration_s`.
    """
    if str(text)[-1:].isdigit():
        raise click.BadParameter(f"expected a time with its unit, such as 90d, 12h, 30m or 45s, got {text!r}")
    return duration_s(text)
