"""Say a thing once when it breaks and once when it heals, and how long to wait in between."""

import random
import time
from collections.abc import Callable

from worker.log import Log

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 15.0


class Trouble:
    """One thing that may be away. Changes as it breaks and heals."""

    def __init__(self, what: str, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._log, self._clock = what, log, clock
        self._since_s: float | None = None
        self._delay_s = FIRST_RETRY_S
        self._retry_at_s = float("-inf")

    @property
    def wait_s(self) -> float:
        """Seconds until the next try is due; 0 when it is, or when nothing is wrong."""
        return max(0.0, self._retry_at_s - self._clock())

    def broke(self, error: Exception, **facts: object) -> float:
        """Note a failure; give the seconds to wait before the next try: longer each time, and never just the same."""
        if self._since_s is None:
            self._since_s = self._clock()
            self._log.warning(f"{self._what} is away", error=str(error), **facts)
        delay_s = self._delay_s * random.uniform(0.5, 1.0)
        self._delay_s = min(self._delay_s * 2, LONGEST_RETRY_S)
        self._retry_at_s = self._clock() + delay_s
        return delay_s

    def healed(self, **facts: object) -> None:
        """Note a success."""
        if self._since_s is not None:
            self._log.info(f"{self._what} is back", down_s=round(self._clock() - self._since_s, 3), **facts)
        self._since_s, self._delay_s, self._retry_at_s = None, FIRST_RETRY_S, float("-inf")
