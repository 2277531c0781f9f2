"""Connections to Redis that never retry by themselves: whether a call may be repeated is for its caller to know.

Knows no scripts and no keys.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from producer.config import read_sentinel_url, redacted
from producer.contract import cluster, tls
from worker.clock import monotonic_s
from worker.cluster import ClusterClient
from worker.errors import ConfigError

AT_ONCE_S = 1.0
"""A first connection that stands this soon was not waited for: nothing says that Redis was out of reach before."""

Client = Any  # redis-py's clients share no typed base
"""A Redis client whose replies are bytes."""


def connect(url: str, *, timeout_s: float, connected: Callable[[], None] | None = None) -> Client:
    """A client of its own for one thread; nothing is sent yet.

    URLs: `redis://`, `rediss://`, `unix://`, `redis+sentinel://HOST:PORT,HOST:PORT/NAME/DB`, and
    `redis+cluster://HOST:PORT,HOST:PORT` (see `producer.contract.cluster`).
    `connected` is told of each connection made: redis-py replaces a broken one without a word.

    Raises:
        ConfigError: the URL cannot be one (its secrets are not repeated).
    """
    options: dict[str, Any] = {  # redis-py's options are untyped
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        "health_check_interval": 0,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    if connected is not None:
        options["redis_connect_func"] = partial(_connect, connected)
    if cluster.is_cluster(url):
        return _of_cluster(url, lambda node: connect(node, timeout_s=timeout_s, connected=connected))
    try:
        tls.check_files(url)
        if "+sentinel://" in url:
            return _behind_sentinels(url, options)
        if url.startswith("unix://"):
            options.pop("socket_keepalive")
        return _sound(redis.Redis.from_url(url, **options))  # pyright: ignore[reportUnknownMemberType]  # its options are untyped
    except (ValueError, TypeError, redis.RedisError) as error:
        raise ConfigError([f"redis url {redacted(url)}: {error}"]) from error


def _of_cluster(url: str, make: Callable[[str], Client]) -> Client:
    try:
        return ClusterClient(cluster.read_url(url), make)
    except ValueError as error:
        raise ConfigError([f"redis url {redacted(url)}: {error}"]) from error


def _sound(client: Client) -> Client:
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)  # an option that does not exist is said now
    return client


def is_cluster(client: Client) -> bool:
    """Whether this client speaks to several shards."""
    return isinstance(client, ClusterClient)


def shards_of(client: Client) -> list[Client]:
    """A client for each server behind this one.

    Raises:
        RedisError: a Cluster does not answer.
    """
    return client.shards() if isinstance(client, ClusterClient) else [client]


def _connect(connected: Callable[[], None], connection: Any) -> None:  # noqa: ANN401  # as `Client`
    connection.on_connect()
    connected()


class Uplink:
    """The exchange's clients, which know since when they stand. Changes when a connection is made anew."""

    def __init__(self, connections: "Connections") -> None:
        self._made_s = monotonic_s() if connections.is_one_server else -inf
        self.since_s = inf
        """-inf: as far as can be seen they always stood."""

        self.client = connections.open(self._noting())
        """Tells the queue what the engine said. Connected first, before the model is loaded."""

        self.puller = connections.open(self._noting())
        """Asks the queue for jobs."""

    def _noting(self) -> Callable[[], None]:
        is_first = True

        def note() -> None:
            nonlocal is_first
            # The first connection of one client beside another's that stands says nothing.
            if not is_first or self.since_s == inf:
                self._note(monotonic_s())
            is_first = False

        return note

    def _note(self, now_s: float) -> None:
        # Whoever was cut off with us could not beat either: for one life nobody is dead.
        was_at_once = self.since_s == inf and now_s - self._made_s <= AT_ONCE_S
        self.since_s = -inf if was_at_once else now_s


class Connections:
    """Clients of one worker, one for each thread that needs one; closed when it ends. A part: start, quiet, stop."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._clients: list[Client] = []
        self.uplink = Uplink(self)

    @property
    def is_one_server(self) -> bool:
        """Whether the URL names one server, and no group in which another may have been promoted a moment ago."""
        return not self._url.startswith(("redis+sentinel:", "redis+cluster:"))

    @property
    def name(self) -> str:
        """The server's URL without its secrets, for messages."""
        return redacted(self._url)

    def open(self, connected: Callable[[], None] | None = None, *, timeout_s: float | None = None) -> Client:
        """Another client, which may give up on a silent server sooner than the others; see `connect`."""
        timeout_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        self._clients.append(connect(self._url, timeout_s=timeout_s, connected=connected))
        return self._clients[-1]

    def start(self) -> None:
        """Nothing to do: a client connects when it is used."""

    def quiet(self) -> None:
        """Nothing to do."""

    def stop(self) -> None:
        """Close every connection."""
        for client in self._clients:
            client.connection_pool.disconnect()


def _behind_sentinels(url: str, options: dict[str, Any]) -> Client:  # as above
    asked = read_sentinel_url(url, options)
    sentinel = Sentinel(asked.addresses, sentinel_kwargs=asked.sentinel_options)
    return sentinel.master_for(asked.service, **asked.options)  # pyright: ignore[reportUnknownMemberType]  # its options are untyped
