"""Which batch is continued next: tenants take turns, however many batches each has. No I/O."""

from collections.abc import Sequence

from sluice.gateway.batches.store import Due

MAX_KNOWN = 10_000
"""Tenants whose turns are remembered."""


class Turns:
    """The turns of one process. Changes with each."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        """The number of each tenant's last turn, in this order."""

        self._number = 0

    def next(self, due: Sequence[Due]) -> Due | None:
        """Return the batch of the tenant whose last turn is longest ago, the first one of several; None without any."""
        turn = min(due, key=lambda one: self._last.get(one.tenant, 0), default=None)
        if turn is not None:
            self._number += 1
            self._last.pop(turn.tenant, None)
            self._last[turn.tenant] = self._number
            if len(self._last) > MAX_KNOWN:
                del self._last[next(iter(self._last))]
        return turn
