"""The worker's Redis clients. They repeat no command: only the caller knows whether it may run twice.

Knows no scripts and no keys.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import inf
from typing import Any, cast

import redis
from redis.commands import CoreCommands

from sluice.protocol.redis import urls
from sluice.protocol.redis.blocking import Cluster, Server
from sluice.protocol.redis.execution import Command, Reply, RoundTripper
from sluice.protocol.redis.pools import Pool, make_pool
from sluice.protocol.redis.routing import NotACluster, SlotTable
from sluice.protocol.redis.urls import redacted
from sluice.worker.clock import monotonic_s
from sluice.worker.errors import ConfigError

AT_ONCE_S = 1.0
"""A first connection made within this time was not waited for, so Redis need not have been unreachable before."""

Client = Any  # redis-py's clients share no typed base
"""A Redis client whose replies are bytes."""


class ServerClient(redis.Redis, Server, RoundTripper):
    """A client of one server, or of the primary behind Sentinels."""

    def __init__(self, url: str, pool: Pool) -> None:
        redis.Redis.__init__(self, connection_pool=pool)  # pyright: ignore[reportUnknownMemberType] (typed in part)
        Server.__init__(self, url, lambda _: pool)


class ClusterClient(CoreCommands, Cluster, RoundTripper):
    """A client of all shards of a Cluster, for one thread. Its nodes are clients, too."""

    _event_dispatcher: Any = None  # redis-py's commands read it

    @property
    def connection_pool(self) -> "ClusterClient":
        """The client itself, which closes connections as redis-py's pools do."""
        return self

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Close every connection. Safe from any thread."""
        clients: list[Any] = self.nodes  # as `Client`
        for node in clients:
            node.connection_pool.disconnect(inuse_connections=inuse_connections)

    def execute_command(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # as redis-py has it
        """Run one command on the shard of its key, or on any shard if it has none.

        Raises:
            RedisError, OSError: from the shard, or it does not answer.
        """
        [reply] = self.exchange([args])
        if isinstance(reply, Exception):
            raise reply
        parse = _parsers().get(args[0])
        options.pop("keys", None)  # for redis-py's cache
        return parse(reply, **options) if parse is not None else reply

    def scan_iter(self, *args: Any, **options: Any) -> Iterator[Any]:  # noqa: ANN401  # as redis-py has it
        """Yield the keys of all shards.

        Raises:
            RedisError: a shard does not answer.
        """
        clients: list[Any] = self.shards()  # as `Client`
        for node in clients:
            yield from node.scan_iter(*args, **options)

    def run(self, commands: Sequence[Command]) -> list[Reply]:
        """As `exchange`; where a shard does not answer, ClusterDownError is the reply to its commands."""
        return self.exchange(commands, is_partial=True)

    def _read_slots(self) -> SlotTable:
        try:
            return super()._read_slots()
        except NotACluster as error:
            raise ConfigError([str(error)]) from error


@cache
def _parsers() -> dict[str, Callable[..., Any]]:  # Any: redis-py types no reply
    """Return redis-py's parsers of replies, by the names of the commands."""
    return cast("dict[str, Callable[..., Any]]", redis.Redis(protocol=2).response_callbacks)  # as above


def connect(url: str, *, timeout_s: float, connected: Callable[[], None] | None = None) -> Client:
    """Make a client for one thread; it does not connect yet.

    URLs: `redis://`, `rediss://`, `unix://`, `redis+sentinel://HOST:PORT,HOST:PORT/NAME/DB`, and
    `redis+cluster://HOST:PORT,HOST:PORT` (see `sluice.protocol.redis.urls`).
    `connected` is called after each connection, also when redis-py replaces a broken one.

    Raises:
        ConfigError: the URL cannot be read; the message does not contain its secrets.
    """
    options: dict[str, Any] = {} if url.startswith("unix://") else {"socket_keepalive": True}
    if connected is not None:
        options["redis_connect_func"] = partial(_connect, connected)
    try:
        if urls.is_cluster(url):
            make = partial(connect, timeout_s=timeout_s, connected=connected)
            return ClusterClient(urls.read_cluster_url(url), make)
        return ServerClient(url, make_pool(url, reply_timeout_s=timeout_s, connect_timeout_s=timeout_s, **options))
    except ValueError as error:
        raise ConfigError([f"redis url {redacted(url)}: {urls.reason_of(url, error)}"]) from None


def is_cluster(client: Client) -> bool:
    """Tell whether this client is one of a Cluster."""
    return isinstance(client, ClusterClient)


def shards_of(client: Client) -> list[Client]:
    """Return a client for each shard of a Cluster, or the client itself.

    Raises:
        RedisError: a Cluster does not answer.
    """
    return client.shards() if isinstance(client, ClusterClient) else [client]


def _connect(connected: Callable[[], None], connection: Any) -> None:  # noqa: ANN401  # as `Client`
    connection.on_connect()
    connected()


class Uplink:
    """The exchange's two clients, and since when both are connected. Changes with each connection."""

    def __init__(self, connections: "Connections") -> None:
        self._made_s = monotonic_s() if connections.is_one_server else -inf
        self.since_s = inf
        """When the last connection was made; -inf if it was there from the start, inf before the first."""

        self.client = connections.open(self._noting())
        """Sends the engine's output. Connected first, before the model is loaded."""

        self.puller = connections.open(self._noting())
        """Pulls jobs."""

    def _noting(self) -> Callable[[], None]:
        is_first = True

        def note() -> None:
            nonlocal is_first
            # A client's first connection is not a reconnection when the other client is already connected.
            if not is_first or self.since_s == inf:
                self._note(monotonic_s())
            is_first = False

        return note

    def _note(self, now_s: float) -> None:
        # Workers that lost Redis at the same time could not send heartbeats either, so their leases get one lifetime.
        was_at_once = self.since_s == inf and now_s - self._made_s <= AT_ONCE_S
        self.since_s = -inf if was_at_once else now_s


class Connections:
    """The clients of one worker, one for each thread that needs one. It closes them when it stops."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._clients: list[Client] = []
        self.uplink = Uplink(self)

    @property
    def is_one_server(self) -> bool:
        """Whether the URL names one server: no failover can have promoted another one a moment ago."""
        return not self._url.startswith(("redis+sentinel:", "redis+cluster:"))

    @property
    def name(self) -> str:
        """The URL without its secrets, for messages."""
        return redacted(self._url)

    def open(self, connected: Callable[[], None] | None = None, *, timeout_s: float | None = None) -> Client:
        """Make another client, optionally with a shorter time-out than the others; see `connect`."""
        timeout_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        self._clients.append(connect(self._url, timeout_s=timeout_s, connected=connected))
        return self._clients[-1]

    def stop(self) -> None:
        """Close every connection."""
        for client in self._clients:
            client.connection_pool.disconnect()
