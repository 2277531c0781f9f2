"""A type of command-line options: finite numbers."""

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A finite number in a range. click's own type accepts NaN, which is neither below nor above a limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401  # as click declares it
        """Return the number.

        Raises:
            click.BadParameter: the value is not a number, not finite, or out of the range.
        """
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
