"""The connection pools of a link, one for each URL."""

import threading
from collections.abc import Callable
from math import inf
from typing import Any

from sluice.producer.transport import bounds
from sluice.protocol.redis import pools, urls
from sluice.protocol.redis.pools import ASYNCIO, BLOCKING, Pool, PoolClasses

REPLY_TIMEOUT_S = 15.0
"""Longer than the longest BLOCK, so that a silent connection is found dead."""

CONNECT_TIMEOUT_S = 5.0

REPLY_SHARE = 0.75
CONNECT_SHARE = 0.4
"""Of the time that an asyncio client waits for a silent server. A round trip must end before its caller gives it up:
from its timeout the client learns to ask the next Sentinel, or for the slot map. Two Sentinels may be gone."""


def make_pool(url: str) -> Pool:
    """Make a pool; it does not connect yet.

    Raises:
        InvalidSetting: the URL cannot be read.
    """
    pool = _make(url, BLOCKING, reply_timeout_s=REPLY_TIMEOUT_S, connect_timeout_s=CONNECT_TIMEOUT_S)
    pool.connection_class = bounds.bounded_class(pool.connection_class)
    return pool


def make_async_pool(url: str, silence_s: float = inf) -> Pool:
    """Make an asyncio pool; it does not connect yet.

    Args:
        url: Of a server, or of one behind Sentinels.
        silence_s: When callers give up a round trip to a server that is silent.

    Raises:
        InvalidSetting: the URL cannot be read.
    """
    connect_s = min(CONNECT_TIMEOUT_S, CONNECT_SHARE * silence_s)
    return _make(url, ASYNCIO, reply_timeout_s=reply_timeout_s(silence_s), connect_timeout_s=connect_s)


def reply_timeout_s(silence_s: float) -> float:
    """Return the longest wait for a reply, with `silence_s` as in `make_async_pool`."""
    return min(REPLY_TIMEOUT_S, REPLY_SHARE * silence_s)


class Pools:
    """The pools of one link, each made at first use. Thread-safe."""

    def __init__(self, make: Callable[[str], Pool]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._by_url: dict[str, Pool] = {}

    def of(self, url: str) -> Pool:
        """Return the pool of a URL.

        Raises:
            InvalidSetting: the URL cannot be read.
        """
        if (found := self._by_url.get(url)) is not None:
            return found  # without the lock, which another thread may have held at a fork
        with self._lock:
            if url not in self._by_url:
                self._by_url[url] = self._make(url)
            return self._by_url[url]

    def all(self) -> list[Pool]:
        """Return every pool made so far."""
        with self._lock:
            return list(self._by_url.values())


def sentinels_of(pool: Pool) -> list[Any]:  # Any: redis-py's clients share no typed base
    """Return the clients of the Sentinels that a pool asks for the primary."""
    manager = getattr(pool, "sentinel_manager", None)
    return [] if manager is None else list(manager.sentinels)


def _make(url: str, classes: PoolClasses, *, reply_timeout_s: float, connect_timeout_s: float) -> Pool:
    try:
        return pools.make_pool(
            url,
            classes,
            reply_timeout_s=reply_timeout_s,
            connect_timeout_s=connect_timeout_s,
            client_name="sluice-producer",
        )
    except ValueError as error:
        raise urls.cannot_read(url, error) from None
