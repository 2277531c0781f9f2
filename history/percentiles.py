"""Percentiles of samples, for the summaries of runs and of the history."""

from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ordered values, interpolated as numpy does: it is at index percent / 100 * (n - 1)."""
    index = percent / 100 * (len(ordered) - 1)
    below = int(index)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (index - below) * (ordered[above] - ordered[below])
