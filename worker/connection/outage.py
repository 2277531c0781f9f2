"""Outages that are logged once when they begin and once when they end, with backoff between retries."""

import time
from collections.abc import Callable

from sluice.protocol.redis.backoff import Backoff
from sluice.worker.log import Log

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 15.0


class Outage:
    """The state of one server that may be unavailable. Changes as it fails and recovers.

    It logs the first failure and the recovery, and schedules retries with backoff and jitter.
    """

    def __init__(self, what: str, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._log, self._clock = what, log, clock
        self._since_s: float | None = None
        self._backoff = Backoff(FIRST_RETRY_S, LONGEST_RETRY_S, jitter=0.5)
        self._retry_at_s = float("-inf")

    @property
    def wait_s(self) -> float:
        """Seconds until the next try is due; 0 if it is due or there is no outage."""
        return max(0.0, self._retry_at_s - self._clock())

    def failed(self, error: Exception, **facts: object) -> float:
        """Record a failure and return the seconds to wait before the next try."""
        if self._since_s is None:
            self._since_s = self._clock()
            self._log.warning(f"{self._what} unreachable", error=str(error), **facts)
        delay_s = self._backoff.next_delay_s()
        self._retry_at_s = self._clock() + delay_s
        return delay_s

    def recovered(self, **facts: object) -> None:
        """Record a success."""
        if self._since_s is not None:
            self._log.info(f"{self._what} reachable again", down_s=round(self._clock() - self._since_s, 3), **facts)
        self._backoff.reset()
        self._since_s, self._retry_at_s = None, float("-inf")
