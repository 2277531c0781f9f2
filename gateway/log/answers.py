"""Count answered requests by status, for the metrics of this gateway process."""

from collections import Counter

ANSWERED: Counter[str] = Counter()
"""By the status, as text; `none` for a client that left before its answer began."""


def count_answer(status: int | None) -> None:
    """Count one."""
    ANSWERED["none" if status is None else str(int(status))] += 1
