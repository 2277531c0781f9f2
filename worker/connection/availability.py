"""Availability of Redis: which errors mean an outage, when to retry, and one log line per outage and recovery."""

import threading

from redis.exceptions import RedisError

from sluice.protocol.redis.backoff import Backoff
from sluice.protocol.redis.error_kinds import ErrorKind, classify, reason_of
from sluice.worker.clock import monotonic_s
from sluice.worker.log import Log

AWAY = (
    ErrorKind.UNAVAILABLE, ErrorKind.LOADING, ErrorKind.MOVED, ErrorKind.DENIED, ErrorKind.FULL, ErrorKind.CANNOT_WRITE,
)  # fmt: skip
"""Errors of the network, and of a server that cannot serve requests now or refuses this user. A refusal passes when an
operator gives the right or the password back; a worker that already serves waits for that, as for an outage."""

MAX_UNEXPECTED_REPLIES = 8
"""After this many other error replies in a row, the fault is in this program."""


def is_away(error: BaseException) -> bool:
    """Return whether the server or the network failed, or this user is refused, so that a retry may help."""
    return classify(error) in AWAY


class RedisHealth:
    """Availability of Redis as seen by all threads of the worker. Changes with their calls."""

    def __init__(self, log: Log, url: str) -> None:
        self._log = log
        self._url = url
        self._lock = threading.Lock()
        self._failing: dict[str, float] = {}
        self._down_since_s: float | None = None
        self.num_outages = 0
        self.stalled_s = float("-inf")
        """When a reply was last so late that heartbeats of other workers may have been late too."""

    @property
    def is_well(self) -> bool:
        """Whether the last call of every thread succeeded."""
        return not self._failing

    def failed(self, who: str, error: BaseException) -> None:
        """Record that a call of thread `who` failed."""
        with self._lock:
            if not self._failing:
                self._down_since_s = monotonic_s()
                self.num_outages += 1
                is_refused = classify(error) is ErrorKind.DENIED
                event = "redis refuses this user" if is_refused else "redis unreachable"
                self._log.warning(event, url=self._url, error=f"{type(error).__name__}: {reason_of(error)}")
            self._failing[who] = monotonic_s()

    def stalled(self) -> None:
        """Record that a reply took longer than the interval of heartbeats."""
        self.stalled_s = monotonic_s()

    def answered(self, who: str) -> None:
        """Record that a call of thread `who` succeeded."""
        if not self._failing:
            return
        with self._lock:
            if self._failing.pop(who, None) is not None and not self._failing and self._down_since_s is not None:
                self._log.info("redis reachable again", down_s=round(monotonic_s() - self._down_since_s, 3))


class RetryPolicy:
    """When one thread retries a Redis call that failed. Changes with each failure and success."""

    def __init__(self) -> None:
        self._backoff = Backoff()
        self._num_unexpected = 0

    def delay_after(self, error: RedisError | OSError) -> float:
        """Return the seconds to wait before the next try.

        Raises:
            RedisError: `error` itself, after too many unexpected error replies in a row: the fault is in this program.
        """
        self._num_unexpected = 0 if is_away(error) else self._num_unexpected + 1
        if self._num_unexpected >= MAX_UNEXPECTED_REPLIES:
            raise error
        return self._backoff.next_delay_s()

    def reset(self) -> None:
        """Start over after a success."""
        self._backoff.reset()
        self._num_unexpected = 0
