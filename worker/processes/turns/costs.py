"""How long switches take: the mean of the last ones to each member."""

from collections import deque
from collections.abc import Iterable

NUM_LAST = 5
UNKNOWN_S = 10.0
"""The cost of a switch before any was measured."""


class SwitchCosts:
    """The costs of a group's switches. Changes with each switch."""

    def __init__(self, names: Iterable[str]) -> None:
        self._last: dict[str, deque[float]] = {name: deque(maxlen=NUM_LAST) for name in names}

    def note(self, name: str, cost_s: float) -> None:
        """Note how long it took until a member was ready."""
        self._last[name].append(cost_s)

    def expected(self) -> dict[str, float]:
        """Return the mean of each member's last switches; of one without, that of all."""
        known = [cost_s for last in self._last.values() for cost_s in last]
        of_all = sum(known) / len(known) if known else UNKNOWN_S
        return {name: sum(last) / len(last) if last else of_all for name, last in self._last.items()}
