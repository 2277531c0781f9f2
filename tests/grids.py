"""Parameter grids: a cross-section for the fast suite, every combination for `make test-long`."""

from collections.abc import Collection, Sequence
from itertools import product
from typing import Any, cast

import pytest
from _pytest.mark.structures import ParameterSet


def cross_section(*axes: Sequence[Any]) -> list[ParameterSet]:  # Any: parameters of every type
    """Return every combination of the axes' values, in order.

    The fast suite runs a diagonal of the grid, on which each value of each axis occurs; the rest is marked `long`.

    Args:
        axes: the values of each parameter. A value that is a tuple stands for several parameters.
    """
    fast = {_diagonal(axes, row) for row in range(max(len(axis) for axis in axes))}
    places = product(*(range(len(axis)) for axis in axes))
    return [_case(axes, place, is_fast=place in fast) for place in places]


def fast_only(fast: Sequence[Any], others: Sequence[Any]) -> list[ParameterSet]:  # Any: as above
    """Return the cases of both lists, those of `others` marked `long`."""
    return [pytest.param(*_values(case)) for case in fast] + [
        pytest.param(*_values(case), marks=pytest.mark.long) for case in others
    ]


def grid(*axes: Sequence[Any], fast: Collection[tuple[Any, ...]]) -> list[ParameterSet]:  # Any: as above
    """Return every combination of the axes' values, in order. Those not in `fast` are marked `long`."""
    cases = [tuple(value for part in row for value in _values(part)) for row in product(*axes)]
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.long) for case in cases]


def _diagonal(axes: Sequence[Sequence[Any]], row: int) -> tuple[int, ...]:
    """Return a position of the diagonal. An axis shifts with each round, so that short axes do not stay in step."""
    return tuple((row + number * (row // len(axis))) % len(axis) for number, axis in enumerate(axes))


def _case(axes: Sequence[Sequence[Any]], place: Sequence[int], *, is_fast: bool) -> ParameterSet:
    values = [value for axis, index in zip(axes, place, strict=True) for value in _values(axis[index])]
    return pytest.param(*values, marks=() if is_fast else pytest.mark.long)


def _values(case: Any) -> tuple[Any, ...]:  # Any: as above
    return cast("tuple[Any, ...]", case) if isinstance(case, tuple) else (case,)  # what the tuple holds is not known
