"""Choice of the batch to continue next: round robin between tenants, however many batches each has. No I/O."""

from collections.abc import Sequence

from sluice.gateway.batches.store import Due

MAX_KNOWN = 10_000
"""Tenants whose turns are remembered."""


class Turns:
    """The turns of one process. Changes with each turn."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        """Number of each tenant's last turn, in ascending order."""

        self._number = 0

    def next(self, due: Sequence[Due]) -> Due | None:
        """Return the first batch of the tenant whose last turn is the longest ago; None if no batch is due."""
        turn = min(due, key=lambda candidate: self._last.get(candidate.tenant, 0), default=None)
        if turn is not None:
            self._number += 1
            self._last.pop(turn.tenant, None)
            self._last[turn.tenant] = self._number
            if len(self._last) > MAX_KNOWN:
                del self._last[next(iter(self._last))]
        return turn
