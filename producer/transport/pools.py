"""redis-py's connection pools, as the client needs them: TLS, Sentinel, time-outs, no retries."""

import threading
from collections.abc import Callable
from typing import Any

from redis import ConnectionPool
from redis import asyncio as redis_async
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelPool
from redis.backoff import NoBackoff
from redis.sentinel import Sentinel, SentinelConnectionPool

from sluice.producer.contract.transport import tls, urls
from sluice.producer.contract.transport.execution import no_retry
from sluice.producer.errors import InvalidSetting

REPLY_TIMEOUT_S = 15.0
"""Longer than the longest BLOCK, so that a silent connection is found dead."""

CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 10_000

Pool = Any  # redis-py's pools share no typed base, and their get_connection has untyped keywords


def make_pool(url: str) -> Pool:
    """Make a pool; it does not connect yet.

    Raises:
        InvalidSetting: the URL cannot be read.
    """
    return _make(url, ConnectionPool, (Sentinel, SentinelConnectionPool), no_retry())


def make_async_pool(url: str) -> Pool:
    """Make an asyncio pool; it does not connect yet.

    Raises:
        InvalidSetting: the URL cannot be read.
    """
    return _make(url, redis_async.ConnectionPool, (AsyncSentinel, AsyncSentinelPool), AsyncRetry(NoBackoff(), 0))


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


def _make(url: str, pool: Pool, behind_sentinels: tuple[Any, Any], retry: object) -> Pool:  # Any: as Pool
    options: dict[str, Any] = {  # Any: redis-py's keyword arguments
        "socket_timeout": REPLY_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": retry,
        "protocol": 2,
        "client_name": "sluice-producer",
        "max_connections": MAX_CONNECTIONS,
    }
    try:
        tls.check_files(url)
        if "+sentinel" in url:
            sentinel, sentinel_pool = behind_sentinels
            asked = urls.read_sentinel_url(url, options)
            manager = sentinel(asked.addresses, sentinel_kwargs=asked.sentinel_options)
            return sentinel_pool(asked.service, manager, **asked.options)
        return _checked(pool.from_url(url, **options))
    except (ValueError, TypeError) as error:
        raise InvalidSetting(f"cannot read the URL {urls.redacted(url)!r}: {error}. {urls.HOW}") from error


def _checked(pool: Pool) -> Pool:
    pool.connection_class(**pool.connection_kwargs)  # raises TypeError for an unknown option
    return pool
