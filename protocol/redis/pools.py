"""redis-py's connection pools for producers and workers: TLS, Sentinel, time-outs, no retries.

Their connections are those of `connections`: one is reused only if its last round trip was completed.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from redis import ConnectionPool, RedisError
from redis import asyncio as redis_async
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelPool
from redis.backoff import NoBackoff
from redis.sentinel import Sentinel, SentinelConnectionPool

from sluice.protocol.redis import tls, urls
from sluice.protocol.redis.connections import AsyncGuard, AsyncLeanPool, Guard, LeanPool, Packer, mixed
from sluice.protocol.redis.execution import no_retry
from sluice.protocol.redis.url_options import read_database, read_options, without_options

MAX_CONNECTIONS = 2**31
"""Unlimited, because redis-py also counts the connections that interrupted calls have dropped."""

SENTINEL_TIMEOUT_S = 2.0
"""Longest wait for a Sentinel, in seconds. Each is asked in turn, and one may have been lost with the primary."""

Pool = Any  # redis-py's pools share no typed base, and their get_connection has untyped keywords


@dataclass(frozen=True, slots=True)
class PoolClasses:
    """The classes of a pool: redis-py has each for blocking calls and for asyncio."""

    pool: Any  # as Pool
    sentinel: Any  # as Pool
    sentinel_pool: Any  # as Pool
    no_retry: Callable[[], object]
    guard: type
    """The mixin of its connections."""

    options: Mapping[str, object]
    """Further options of its connections."""


BLOCKING: Final = PoolClasses(
    mixed(LeanPool, ConnectionPool),
    Sentinel,
    mixed(LeanPool, SentinelConnectionPool),
    no_retry,
    Guard,
    {"command_packer": Packer()},
)
ASYNCIO: Final = PoolClasses(
    mixed(AsyncLeanPool, redis_async.ConnectionPool),
    AsyncSentinel,
    mixed(AsyncLeanPool, AsyncSentinelPool),
    lambda: AsyncRetry(NoBackoff(), 0),
    AsyncGuard,
    {},
)


def make_pool(
    url: str, classes: PoolClasses = BLOCKING, *, reply_timeout_s: float, connect_timeout_s: float, **more: object
) -> Pool:
    """Create a pool of connections to one server, or to the primary behind Sentinels; it does not connect yet.

    Args:
        url: A URL as in `urls`, but not of a Cluster.
        classes: `BLOCKING` or `ASYNCIO`.
        reply_timeout_s: Longest wait for a reply, in seconds.
        connect_timeout_s: Longest wait for a connection, in seconds.
        more: redis-py's options of a connection. Those of the URL take precedence.

    Raises:
        ValueError: the URL cannot be read. The message does not contain its secrets.
    """
    options: dict[str, Any] = {  # Any: redis-py's keyword arguments
        "socket_timeout": reply_timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        "protocol": 2,
        "max_connections": MAX_CONNECTIONS,
        "retry": classes.no_retry(),
        **classes.options,
        **more,
    }
    try:
        read_options(
            url
        )  # before the files, since its message about an option is better than that a file cannot be read
        tls.check_files(url)
        if "+sentinel://" in url:
            parsed = urls.read_sentinel_url(url, options)
            for name in ("socket_timeout", "socket_connect_timeout"):
                parsed.sentinel_options[name] = min(parsed.sentinel_options[name], SENTINEL_TIMEOUT_S)
            sentinels = classes.sentinel(parsed.addresses, sentinel_kwargs=parsed.sentinel_options)
            for sentinel in sentinels.sentinels:
                _guard(sentinel.connection_pool, classes)
                sentinel.connection_pool.connection_kwargs.update(classes.options)
            pool = classes.sentinel_pool(parsed.service, sentinels, **parsed.options)
        else:
            pool = _one_server_pool(url, classes, options)
            pool.connection_class(**pool.connection_kwargs)  # raises for options that exclude each other
    except (TypeError, RedisError) as error:
        raise ValueError(str(error)) from error
    _guard(pool, classes)
    return pool


def _guard(pool: Pool, classes: PoolClasses) -> None:
    pool.connection_class = mixed(classes.guard, pool.connection_class)


def _one_server_pool(url: str, classes: PoolClasses, options: dict[str, Any]) -> Pool:
    of_url = read_options(url)
    if not url.startswith("unix:"):
        of_url["db"] = read_database(urlsplit(url).path.strip("/"), of_url)
    return classes.pool.from_url(without_options(url), **{**options, **of_url})


class Pools:
    """The pools of one client, one for each URL, created at first use. Thread-safe."""

    def __init__(self, make: Callable[[str], Pool]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._by_url: dict[str, Pool] = {}

    def of(self, url: str) -> Pool:
        """Return the pool of a URL.

        Raises:
            ValueError, InvalidSetting: the URL cannot be read.
        """
        if (pool := self._by_url.get(url)) is not None:
            return pool  # without the lock, which another thread may have held at a fork
        with self._lock:
            if url not in self._by_url:
                self._by_url[url] = self._make(url)
            return self._by_url[url]

    def all(self) -> list[Pool]:
        """Return all pools created so far."""
        with self._lock:
            return list(self._by_url.values())


def sentinels_of(pool: Pool) -> list[Any]:  # Any: redis-py's clients share no typed base
    """Return the clients of the Sentinels that a pool asks for the primary."""
    manager = getattr(pool, "sentinel_manager", None)
    return [] if manager is None else list(manager.sentinels)
