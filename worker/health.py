"""Whether Redis answers: said once when it breaks and once when it heals, whichever thread notices first."""

import threading

from redis.exceptions import (
    AskError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from producer.contract.running import longer_delay_s
from worker.clock import monotonic_s
from worker.log import Log

AWAY_CODES = (
    "LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "MISCONF", "NOREPLICAS", "OOM",
    "NOAUTH", "WRONGPASS", "NOPERM",
)  # fmt: skip
"""Error replies of a server that is there but cannot serve for now."""

AWAY_KINDS = (AskError, ClusterDownError, NoPermissionError, OutOfMemoryError, ReadOnlyError, TryAgainError)
"""The same, where redis-py has a class for it: then the word is cut from the reply."""

MAX_STRANGE_REPLIES = 8
"""This many error replies of another kind in a row, and we are the ones who are wrong."""


def is_away(error: BaseException) -> bool:
    """Whether the server, or the way to it, is what fails: trying again is right."""
    if isinstance(error, (RedisConnectionError, RedisTimeoutError, OSError, *AWAY_KINDS)):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(AWAY_CODES)


class RedisHealth:
    """Shared by all threads that talk to Redis. Changes with what they meet."""

    def __init__(self, log: Log, url: str) -> None:
        self._log = log
        self._url = url
        self._lock = threading.Lock()
        self._failing: dict[str, float] = {}
        self._down_since_s: float | None = None
        self.num_outages = 0
        self.stalled_s = float("-inf")
        """When an answer last came so late that beats of other workers may have come too late as well."""

    @property
    def is_well(self) -> bool:
        """Whether every thread had its last answer."""
        return not self._failing

    def failed(self, who: str, error: BaseException) -> None:
        """Thread `who` did not get an answer."""
        with self._lock:
            if not self._failing:
                self._down_since_s = monotonic_s()
                self.num_outages += 1
                self._log.warning("redis unreachable", url=self._url, error=f"{type(error).__name__}: {error}")
            self._failing[who] = monotonic_s()

    def stalled(self) -> None:
        """An answer took longer than the time between two beats."""
        self.stalled_s = monotonic_s()

    def answered(self, who: str) -> None:
        """Thread `who` got an answer."""
        if not self._failing:
            return
        with self._lock:
            if self._failing.pop(who, None) is not None and not self._failing and self._down_since_s is not None:
                self._log.info("redis reachable again", down_s=round(monotonic_s() - self._down_since_s, 3))


class Patience:
    """How one thread goes on after an error: waits longer each time, and gives up on what cannot heal."""

    def __init__(self) -> None:
        self._delay_s = 0.0
        self._num_strange = 0

    def after(self, error: RedisError | OSError) -> float:
        """Seconds to wait before the next try.

        Raises:
            RedisError: the same kind of reply has come too often; it is our error.
        """
        self._num_strange = 0 if is_away(error) else self._num_strange + 1
        if self._num_strange >= MAX_STRANGE_REPLIES:
            raise error
        self._delay_s = longer_delay_s(self._delay_s)
        return self._delay_s

    def reset(self) -> None:
        """An answer came."""
        self._delay_s = 0.0
        self._num_strange = 0
