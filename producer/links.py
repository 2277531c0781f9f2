"""Connections to the queue's server: one pipelined round trip at a time, repeated at our level where that is safe.

redis-py makes the connections (TLS, Sentinel, passwords) but never repeats a command by itself: a repeated submit must
carry the same ids, and only we know that it does. Knows no queue: commands go out, replies come back.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from redis import ConnectionPool
from redis import asyncio as redis_async
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from producer import config
from producer.commands import Ask, Command, Reply, with_source
from producer.contract import tls
from producer.contract.running import longer_delay_s, no_retry
from producer.errors import (
    AccessDenied,
    CertificateRefused,
    InvalidSetting,
    NotAQueue,
    ProducerError,
    QueueFull,
    QueueRefused,
    QueueUnreachable,
)

REPLY_TIMEOUT_S = 15.0
"""Longer than the longest BLOCK, so that a silent connection is found dead."""

CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 10_000
MAX_ASKS = 16
"""Round trips of one asyncio client at once, beside reads that block."""

MAX_IN_FLIGHT = 4
"""Asks sent ahead of their replies by submit_many: the server works on one while the next is packed."""

AWAY = (RedisConnectionError, RedisTimeoutError, MasterNotFoundError, OSError)
"""What a restart or a failover looks like: worth another try."""

AWAY_WORDS = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY ", "UNBLOCKED")
AWAY_REPLIES = (AskError, ClusterDownError, ReadOnlyError, TryAgainError)
"""The same, where redis-py has a class for it: then the word is cut from the reply."""

DENIED_WORDS = ("NOAUTH", "NOPERM", "ACL failure in script", "The user executing the script can't")
"""How servers say that a user may not: alone, and inside a script (Valkey, Redis 7.0 and 6.2)."""

HOPELESS = (AuthenticationError, NoPermissionError, InvalidResponse)

Connection = Any  # redis-py's connections share no public typed base
_POOL: Any = ConnectionPool  # Any: its from_url has untyped keywords
_ASYNC_POOL: Any = redis_async.ConnectionPool  # Any: as above


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Where to connect, and how long to keep trying once a first connection stood."""

    url: str
    patience_s: float = 30.0

    def __repr__(self) -> str:
        return f"LinkSettings({config.redacted(self.url)!r}, patience_s={self.patience_s:g})"


# ---------------------------------------------------------------- what errors mean


@dataclass(slots=True, eq=False)
class Patience:
    """How long to go on trying: not at all before the first connection stood, unless the server says that it loads."""

    settings: LinkSettings
    has_connected: bool
    begin_s: float
    delay_s: float = 0.0

    def next_delay_s(self, error: Exception, *, is_repeatable: bool = True) -> float:
        """Seconds to wait before the next try.

        Raises:
            QueueUnreachable: there is no next try.
        """
        is_hopeless = isinstance(error, HOPELESS) or not (self.has_connected or isinstance(error, BusyLoadingError))
        is_late = time.monotonic() - self.begin_s > self.settings.patience_s
        if is_hopeless or is_late or not is_repeatable:
            raise _unreachable(error, self.settings.url, is_repeatable=is_repeatable) from error
        self.delay_s = longer_delay_s(self.delay_s)
        return self.delay_s


def _unreachable(error: Exception, url: str, *, is_repeatable: bool = True) -> QueueUnreachable:
    where = config.redacted(url)
    if isinstance(error, (AuthenticationError, NoPermissionError)):
        return AccessDenied(f"{where} refuses this user: {error}. Check user name, password and rights.")
    if isinstance(error, InvalidResponse):
        return NotAQueue(f"what answers at {where} is not Redis. Check host and port.")
    if tls.may_be_refused(error, url):
        return CertificateRefused(f"{where}: TLS was refused, on one side or the other: {error}. {tls.HOW}")
    unsure = "" if is_repeatable else " Whether the command was carried out is not known: look before you repeat it."
    return QueueUnreachable(f"{where} does not answer: {error}. Check the address, and that the server runs.{unsure}")


def checked(ask: Ask, replies: list[Reply], url: str) -> list[Reply]:
    """The replies, if none is an error; those of a lenient ask with our errors among them."""
    return [_checked_one(reply, url, ask) if isinstance(reply, Exception) else reply for reply in replies]


def _checked_one(error: Exception, url: str, ask: Ask) -> Reply:
    if str(error).startswith(AWAY_WORDS) or isinstance(error, AWAY_REPLIES):
        raise RedisConnectionError(str(error)) from error
    refusal = _refusal(error, url)
    if ask.is_lenient:
        return refusal
    raise refusal from error


def _refusal(error: Exception, url: str) -> ProducerError:
    if isinstance(error, (AuthenticationError, NoPermissionError)) or any(word in str(error) for word in DENIED_WORDS):
        return _unreachable(AuthenticationError(str(error)), url)
    if isinstance(error, OutOfMemoryError):
        where = config.redacted(url)
        return QueueFull(f"{where} is at its maxmemory. Try again later, or give it more memory.",
                         reason="full_memory", waiting=(0, 0, 0), bound=0)  # fmt: skip
    return QueueRefused(f"{config.redacted(url)} refuses the command: {error}")


def unknown_scripts(replies: Sequence[Reply]) -> Sequence[int]:
    """Places of calls whose script the server does not know."""
    return [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]


def in_full(ask: Ask) -> Ask:
    """The same with every script in full. All of it is sent again: what a reply says may rest on the order of two."""
    return replace(ask, commands=tuple(map(with_source, ask.commands)))


def only(ask: Ask, places: Sequence[int]) -> Ask:
    """The commands at these places alone."""
    return replace(ask, commands=tuple(ask.commands[place] for place in places))


def merged(replies: Sequence[Reply], places: Sequence[int], later: Sequence[Reply]) -> list[Reply]:
    """Replies of which those at some places came later."""
    found = dict(zip(places, later, strict=True))
    return [found.get(place, reply) for place, reply in enumerate(replies)]


# ---------------------------------------------------------------- pools


def _pool_options(retry: object) -> dict[str, Any]:  # Any: redis-py's keyword arguments
    return {
        "socket_timeout": REPLY_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": retry,
        "protocol": 2,
        "client_name": "sluice-producer",
        "max_connections": MAX_CONNECTIONS,
    }


def make_pool(url: str) -> ConnectionPool:
    """A pool of connections; none is made yet.

    Raises:
        InvalidSetting: the URL cannot be read.
    """
    pool_options = _pool_options(no_retry())
    try:
        tls.check_files(url)
        if "+sentinel" in url:
            asked = config.read_sentinel_url(url, pool_options)
            sentinel = Sentinel(asked.addresses, sentinel_kwargs=asked.sentinel_options)
            return SentinelConnectionPool(asked.service, sentinel, **asked.options)
        return _sound(_POOL.from_url(url, **pool_options))
    except (ValueError, TypeError) as error:
        raise InvalidSetting(f"cannot read the URL {config.redacted(url)!r}: {error}. {config.HOW}") from error


def make_async_pool(url: str) -> redis_async.ConnectionPool:
    """A pool of asyncio connections; none is made yet.

    Raises:
        InvalidSetting: the URL cannot be read.
    """
    pool_options = _pool_options(AsyncRetry(NoBackoff(), 0))
    try:
        tls.check_files(url)
        if "+sentinel" in url:
            asked = config.read_sentinel_url(url, pool_options)
            sentinel = AsyncSentinel(asked.addresses, sentinel_kwargs=asked.sentinel_options)
            return AsyncSentinelPool(asked.service, sentinel, **asked.options)
        return _sound(_ASYNC_POOL.from_url(url, **pool_options))
    except (ValueError, TypeError) as error:
        raise InvalidSetting(f"cannot read the URL {config.redacted(url)!r}: {error}. {config.HOW}") from error


def _sound(pool: Any) -> Any:  # noqa: ANN401  # pools of either kind
    pool.connection_class(**pool.connection_kwargs)  # an option that does not exist is said now
    return pool


def _sentinels(pool: object) -> list[Any]:  # Any: clients of either kind
    manager: Any = getattr(pool, "sentinel_manager", None)
    return [] if manager is None else list(manager.sentinels)


# ---------------------------------------------------------------- waiting


class Link:
    """Asks over a pool of connections, each ask on a connection of its own; safe to share between threads."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._pool: Any = make_pool(settings.url)  # Any: its get_connection has untyped keywords
        self._has_connected = False

    def __repr__(self) -> str:
        return f"Link({self._settings!r})"

    def ask(self, ask: Ask) -> list[Reply]:
        """Send, and wait for the replies.

        Raises:
            QueueUnreachable: the server stayed away for longer than our patience.
            QueueRefused, QueueFull: it refuses the command.
        """
        patience = self.patience()
        while True:
            try:
                return self._try(ask)
            except AWAY + HOPELESS as error:
                time.sleep(patience.next_delay_s(error, is_repeatable=ask.is_repeatable))

    @contextmanager
    def pipe(self) -> Generator["Pipe"]:
        """One connection on which asks are sent ahead of their replies."""
        pipe = Pipe(self)
        try:
            yield pipe
        finally:
            pipe.close()

    def close(self) -> None:
        """Close every connection, those to the sentinels too."""
        self._pool.disconnect()
        for sentinel in _sentinels(self._pool):
            sentinel.close()

    def patience(self) -> Patience:
        """A fresh count of tries."""
        return Patience(self._settings, self._has_connected, time.monotonic())

    def _try(self, ask: Ask) -> list[Reply]:
        return self.checked(ask, self.exchange(ask))

    def exchange(self, ask: Ask) -> list[Reply]:
        """Send once, and wait for the replies; an error reply is one of them."""
        connection = self.connect()
        try:
            replies = self._exchange(connection, ask)
            if places := unknown_scripts(replies):
                places = range(len(replies)) if ask.is_repeatable else places
                replies = merged(replies, places, self._exchange(connection, in_full(only(ask, places))))
        finally:
            self._pool.release(connection)
        return replies

    def connect(self) -> Connection:
        """Take a connection from the pool, connected."""
        connection: Connection = self._pool.get_connection()
        self._has_connected = True
        return connection

    def give_back(self, connection: Connection) -> None:
        """Return a connection to the pool."""
        self._pool.release(connection)

    def checked(self, ask: Ask, replies: list[Reply]) -> list[Reply]:
        """The replies, if none is an error; those of a lenient ask with our errors among them.

        Raises:
            QueueRefused, QueueFull, AccessDenied: one is.
        """
        return checked(ask, replies, self._settings.url)

    def _exchange(self, connection: Connection, ask: Ask) -> list[Reply]:
        connection.send_packed_command(connection.pack_commands(ask.commands))
        return [_read(connection) for _ in ask.commands]


def _read(connection: Connection) -> Reply:
    try:
        return connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error


class Pipe:
    """Asks in flight on one connection, answered in order. After a lost connection all of them are sent again."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._connection: Connection | None = None
        self._in_flight: deque[Ask] = deque()

    @property
    def is_full(self) -> bool:
        """Whether a reply should be read before more is sent."""
        return len(self._in_flight) >= MAX_IN_FLIGHT

    def send(self, ask: Ask) -> None:
        """Send without waiting."""
        self._in_flight.append(ask)
        if self._connection is not None:
            try:
                self._transmit(ask)
            except AWAY:
                self._drop()  # receive will connect, and send all that is in flight

    def receive(self) -> list[Reply]:
        """Wait for the replies to the oldest ask in flight.

        Raises:
            QueueUnreachable, QueueRefused, QueueFull: as in `Link.ask`.
        """
        patience = self._link.patience()
        while True:
            try:
                replies = self._link.checked(self._in_flight[0], self._try())
            except AWAY + HOPELESS as error:
                self._drop()
                time.sleep(patience.next_delay_s(error))
            else:
                self._in_flight.popleft()
                return replies

    def close(self) -> None:
        """Give the connection back; one with replies still to come is closed."""
        if self._in_flight:
            self._drop()
        elif self._connection is not None:
            self._link.give_back(self._connection)
            self._connection = None

    def _try(self) -> list[Reply]:
        if self._connection is None:
            self._connection = self._link.connect()
            self._transmit(*self._in_flight)
        replies = [_read(self._connection) for _ in self._in_flight[0].commands]
        if not unknown_scripts(replies):
            return replies
        # The rest in flight has met the same: go through what is still to come, and send all again in full.
        for ask in list(self._in_flight)[1:]:
            _ = [_read(self._connection) for _ in ask.commands]
        self._in_flight = deque(map(in_full, self._in_flight))
        self._transmit(*self._in_flight)
        return [_read(self._connection) for _ in self._in_flight[0].commands]

    def _transmit(self, *asks: Ask) -> None:
        assert self._connection is not None
        commands = [command for ask in asks for command in ask.commands]
        self._connection.send_packed_command(self._connection.pack_commands(commands))

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._link.give_back(self._connection)
            self._connection = None


# ---------------------------------------------------------------- awaiting


class AsyncLink:
    """As `Link`, for asyncio."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._pool: Any = make_async_pool(settings.url)  # Any: as in Link
        self._slots = asyncio.Semaphore(MAX_ASKS)
        self._has_connected = False

    def __repr__(self) -> str:
        return f"AsyncLink({self._settings!r})"

    async def ask(self, ask: Ask) -> list[Reply]:
        """Send, and wait for the replies; at most `MAX_ASKS` at once, so that a burst opens no more connections.

        Raises:
            QueueUnreachable, QueueRefused, QueueFull: as in `Link.ask`.
        """
        async with self._slots:
            return await self.ask_blocking(ask)

    async def ask_blocking(self, ask: Ask) -> list[Reply]:
        """As `ask`, for a read that blocks at the server: it takes no place from the others."""
        patience = self.patience()
        while True:
            try:
                return await self._try(ask)
            except AWAY + HOPELESS as error:
                await asyncio.sleep(patience.next_delay_s(error, is_repeatable=ask.is_repeatable))

    @asynccontextmanager
    async def pipe(self) -> AsyncGenerator["AsyncPipe"]:
        """One connection on which asks are sent ahead of their replies."""
        pipe = AsyncPipe(self)
        try:
            yield pipe
        finally:
            await pipe.close()

    async def close(self) -> None:
        """Close every connection, those to the sentinels too."""
        await self._pool.disconnect()
        for sentinel in _sentinels(self._pool):
            await sentinel.aclose()

    def patience(self) -> Patience:
        """A fresh count of tries."""
        return Patience(self._settings, self._has_connected, time.monotonic())

    async def connect(self) -> Connection:
        """Take a connection from the pool, connected."""
        connection: Connection = await self._pool.get_connection()
        self._has_connected = True
        return connection

    async def give_back(self, connection: Connection) -> None:
        """Return a connection to the pool."""
        await self._pool.release(connection)

    def checked(self, ask: Ask, replies: list[Reply]) -> list[Reply]:
        """As `Link.checked`."""
        return checked(ask, replies, self._settings.url)

    async def _try(self, ask: Ask) -> list[Reply]:
        return self.checked(ask, await self.exchange(ask))

    async def exchange(self, ask: Ask) -> list[Reply]:
        """As `Link.exchange`."""
        connection = await self.connect()
        try:
            replies = await self._exchange(connection, ask)
            if places := unknown_scripts(replies):
                places = range(len(replies)) if ask.is_repeatable else places
                replies = merged(replies, places, await self._exchange(connection, in_full(only(ask, places))))
        finally:
            await self._pool.release(connection)
        return replies

    async def _exchange(self, connection: Connection, ask: Ask) -> list[Reply]:
        await _send_async(connection, ask.commands)
        return [await _read_async(connection) for _ in ask.commands]


async def _send_async(connection: Connection, commands: Sequence[Command]) -> None:
    """Send, and hear of a cancellation that redis-py loses.

    It sends within `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes just as the send
    ends: a reader would go on although its task was cancelled.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancellations = task.cancelling()
    await connection.send_packed_command(connection.pack_commands(commands))
    if task.cancelling() > num_cancellations:
        await connection.disconnect(nowait=True)  # its reply will not be read
        raise asyncio.CancelledError


async def _read_async(connection: Connection) -> Reply:
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error


class AsyncPipe:
    """As `Pipe`, for asyncio."""

    def __init__(self, link: AsyncLink) -> None:
        self._link = link
        self._connection: Connection | None = None
        self._in_flight: deque[Ask] = deque()

    @property
    def is_full(self) -> bool:
        """Whether a reply should be read before more is sent."""
        return len(self._in_flight) >= MAX_IN_FLIGHT

    async def send(self, ask: Ask) -> None:
        """Send without waiting for a reply."""
        self._in_flight.append(ask)
        if self._connection is not None:
            try:
                await self._transmit(ask)
            except AWAY:
                await self._drop()  # receive will connect, and send all that is in flight

    async def receive(self) -> list[Reply]:
        """Wait for the replies to the oldest ask in flight.

        Raises:
            QueueUnreachable, QueueRefused, QueueFull: as in `Link.ask`.
        """
        patience = self._link.patience()
        while True:
            try:
                replies = self._link.checked(self._in_flight[0], await self._try())
            except AWAY + HOPELESS as error:
                await self._drop()
                await asyncio.sleep(patience.next_delay_s(error))
            else:
                self._in_flight.popleft()
                return replies

    async def close(self) -> None:
        """Give the connection back; one with replies still to come is closed."""
        if self._in_flight:
            await self._drop()
        elif self._connection is not None:
            await self._link.give_back(self._connection)
            self._connection = None

    async def _try(self) -> list[Reply]:
        if self._connection is None:
            self._connection = await self._link.connect()
            await self._transmit(*self._in_flight)
        replies = [await _read_async(self._connection) for _ in self._in_flight[0].commands]
        if not unknown_scripts(replies):
            return replies
        # As in Pipe: all in flight have met the same.
        for ask in list(self._in_flight)[1:]:
            _ = [await _read_async(self._connection) for _ in ask.commands]
        self._in_flight = deque(map(in_full, self._in_flight))
        await self._transmit(*self._in_flight)
        return [await _read_async(self._connection) for _ in self._in_flight[0].commands]

    async def _transmit(self, *asks: Ask) -> None:
        assert self._connection is not None
        commands = [command for ask in asks for command in ask.commands]
        await _send_async(self._connection, commands)

    async def _drop(self) -> None:
        if self._connection is not None:
            await self._connection.disconnect()
            await self._link.give_back(self._connection)
            self._connection = None
