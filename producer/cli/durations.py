"""The type of options that are a time."""

import re

import click

UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_S = 100 * 366 * UNITS_S["d"]


def duration_s(text: str) -> float:
    """Return the seconds of a time such as 90d, 12h, 30m, 45s or 45.

    Raises:
        click.BadParameter: it is none, or over a century.
    """
    match = re.fullmatch(r"([0-9]{1,10}(?:\.[0-9]{1,9})?)([smhd]?)", str(text))
    seconds = float(match[1]) * UNITS_S[match[2]] if match else MAX_S + 1
    if seconds > MAX_S:
        raise click.BadParameter(f"expected a time such as 90d, 12h, 30m, 45s or 45, got {text!r}")
    return seconds


def duration_with_unit_s(text: str) -> float:
    """Return the seconds of a time that names its unit, where a bare number would be mistaken: 90 is not 90 days.

    Raises:
        click.BadParameter: it names none, or as `duration_s`.
    """
    if str(text)[-1:].isdigit():
        raise click.BadParameter(f"expected a time with its unit, such as 90d, 12h, 30m or 45s, got {text!r}")
    return duration_s(text)
