"""Find the largest rate of arrivals at which a condition holds (capacity search: Sarathi-Serve, OSDI 2024)."""

from collections.abc import Callable


def largest_rate(holds: Callable[[float], bool], *, low: float, high: float, tolerance: float = 0.05) -> float:
    """Return the largest rate between `low` and `high` at which `holds`, by bisection of its logarithm.

    Args:
        holds: whether a rate meets the condition; must be monotonic.
        low: tried first.
        high: upper limit of the search.
        tolerance: how far below the true rate the answer may be, as a share of it.

    Returns:
        0 if not even `low` meets the condition.
    """
    if not holds(low):
        return 0.0
    if holds(high):
        return high
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
