"""redis-py's connections and pools, made safe for calls that a signal handler or a cancellation ends at any point.

A connection counts its outstanding replies, including those of its handshake. A connection with any is closed when it
returns to its pool, so no call receives the reply to another. The count is increased before a command is sent and
decreased after its reply is read, so an exception in between leaves it too high, never too low.

The pools do little when they take and return a connection. Those of redis-py also collect metrics, which costs as much
processor time as a round trip.
"""

# The base classes of redis-py's classes are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import asyncio
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any, cast
from weakref import WeakSet

import hiredis
from redis.exceptions import DataError, RedisError, ResponseError

from sluice.protocol.redis.execution import Command, Reply

LAST_TRY_S = 1.0
"""How long a round trip may last after its deadline, because the last look at a job begins at the deadline."""

Connection = Any  # redis-py's connections share no typed base
untyped_hiredis: Any = hiredis  # Any: its types have commands of one word


def pack(command: Command) -> bytes:
    """Encode a command for the wire.

    Numbers are formatted here, not by hiredis: its call of `repr` may run a pending signal handler, and if that
    raises, hiredis 3.5 continues without the text and crashes with SIGSEGV.

    Raises:
        DataError: an argument is not text, bytes or a number.
    """
    # By type, because a submit has thousands of arguments, of which hardly any is a number.
    plain = tuple([part if (kind := type(part)) is bytes or kind is str else _plain(part) for part in command])
    try:
        return untyped_hiredis.pack_command(plain)
    except TypeError as error:
        raise DataError(str(error)) from error


def _plain(argument: object) -> object:
    if isinstance(argument, bytearray | memoryview):
        return bytes(cast("memoryview", argument))
    if isinstance(argument, float):
        return float.__repr__(argument)
    return repr(argument) if type(argument) is int else argument  # hiredis refuses other types, and bool


class Packer:
    """The command packer of a redis-py connection."""

    def pack(self, *command: Any) -> list[bytes]:  # noqa: ANN401  # as redis-py has it
        """Encode a command; its name may have two words."""
        name, *arguments = command
        words = (name.encode() if isinstance(name, str) else name).split()
        return [pack((*words, *arguments))]


# ---------------------------------------------------------------- deadlines of blocking round trips

_deadline_s: ContextVar[float | None] = ContextVar("deadline of a round trip", default=None)


def try_s(deadline_s: float) -> float:
    """Return the time limit of a round trip with this deadline that begins now, in seconds."""
    return max(0.0, deadline_s - monotonic()) + LAST_TRY_S


@contextmanager
def bounded(deadline_s: float | None) -> Generator[None]:
    """Set a deadline for this thread's connects and reads; a connection itself has only one time-out for all."""
    before_s = _deadline_s.get()
    try:
        _deadline_s.set(
            deadline_s
        )  # inside the try, so that a signal handler that raises does not leave the deadline set
        yield
    finally:
        _deadline_s.set(before_s)


def _left_s() -> float | None:
    """Return how long this thread may wait now, in seconds; None: the socket's own time-out."""
    deadline_s = _deadline_s.get()
    return None if deadline_s is None else try_s(deadline_s)


# ---------------------------------------------------------------- connections

Base: Any = object  # Any: the classes below are mixed into redis-py's


class Guard(Base):
    """Mixin of a blocking connection that counts outstanding replies. Changes with each command and reply."""

    num_owed = 0
    """Number of outstanding replies; a handshake in progress counts as one."""

    pool: Any = None  # redis-py's pools share no typed base
    """The pool to which the connection returns; set while it is in use."""

    def connect(self) -> None:
        """Connect, unless it is connected without outstanding replies."""
        if self.num_owed:
            self.disconnect()
        if self.is_connected:
            return
        self.num_owed += 1
        try:
            self._connect_in_time()
        except BaseException:
            self.disconnect()
            raise
        self.num_owed -= 1

    def _connect_in_time(self) -> None:
        bound_s = _left_s()
        if bound_s is None:
            super().connect()
            return
        usual_s, usual_connect_s = self.socket_timeout, self.socket_connect_timeout
        self.socket_timeout = min(usual_s or bound_s, bound_s)
        self.socket_connect_timeout = min(usual_connect_s or bound_s, bound_s)
        try:
            super().connect()
        finally:
            self.socket_timeout, self.socket_connect_timeout = usual_s, usual_connect_s
        # Restore it in the socket and the parser, which have copied the shorter one; -1 means the connection's own.
        self.update_current_socket_timeout(-1)

    def disconnect(self, *args: Any, **options: Any) -> None:  # noqa: ANN401  # as redis-py has it
        """Disconnect; no replies are outstanding any more."""
        super().disconnect(*args, **options)
        self.num_owed = 0

    def send_command(self, *args: Any, **options: Any) -> None:  # noqa: ANN401  # as above
        """Send one command."""
        self.num_owed += 1
        super().send_command(*args, **options)

    def pack_commands(self, commands: Iterable[Any]) -> list[bytes]:
        """Encode the commands that are sent next."""
        sent = list(commands)
        self.num_owed += len(sent)
        return super().pack_commands(sent)

    def read_response(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # as above
        """Read one reply."""
        try:
            reply = super().read_response(*args, **options)
        except ResponseError:
            self.num_owed = max(0, self.num_owed - 1)
            raise
        self.num_owed = max(0, self.num_owed - 1)  # a subscription has more messages than commands
        return reply

    def send_commands(self, commands: Sequence[Command]) -> None:
        """Send several commands."""
        self.send_packed_command(self.pack_commands(commands))

    def read_replies(self, num_replies: int) -> list[Reply]:
        """Read replies; an error reply is returned in its place, as an exception."""
        return [self._read() for _ in range(num_replies)]

    def _read(self) -> Reply:
        bound = {} if (left_s := _left_s()) is None else {"timeout": left_s}
        try:
            return self.read_response(disable_decoding=True, **bound)
        except ResponseError as error:
            return error

    def release(self) -> None:
        """Return to the pool."""
        self.pool.release(self)

    def drop(self) -> None:
        """Close, and return to the pool."""
        self.disconnect()
        self.release()


class AsyncGuard(Base):
    """Mixin of an asyncio connection, as `Guard`."""

    num_owed = 0
    pool: Any = None  # as in `Guard`

    async def connect(self) -> None:
        """Connect, unless it is connected without outstanding replies."""
        if self.num_owed:
            await self.disconnect(nowait=True)
        if self.is_connected:
            return
        self.num_owed += 1
        try:
            await super().connect()
        except BaseException:
            await self.disconnect(nowait=True)
            raise
        self.num_owed -= 1

    async def disconnect(self, *args: Any, **options: Any) -> None:  # noqa: ANN401  # as redis-py has it
        """Disconnect; no replies are outstanding any more."""
        await super().disconnect(*args, **options)
        self.num_owed = 0

    async def send_command(self, *args: Any, **options: Any) -> None:  # noqa: ANN401  # as above
        """Send one command."""
        self.num_owed += 1
        await super().send_command(*args, **options)

    async def send_commands(self, commands: Sequence[Command]) -> None:
        """Send several commands, and raise a cancellation that redis-py loses.

        redis-py sends within `asyncio.wait_for`, which before Python 3.12 drops a cancellation that arrives just as
        the send ends: a reader would continue although its task was cancelled.
        """
        task = asyncio.current_task()
        assert task is not None
        num_cancellations = task.cancelling()
        self.num_owed += len(commands)
        # On asyncio, redis-py packs them in Python, which takes ten times as long.
        await self.send_packed_command(b"".join(map(pack, commands)))
        if task.cancelling() > num_cancellations:
            await self.disconnect(nowait=True)  # the reply will not be read
            raise asyncio.CancelledError

    async def read_response(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # as above
        """Read one reply."""
        try:
            reply = await super().read_response(*args, **options)
        except ResponseError:
            self.num_owed = max(0, self.num_owed - 1)
            raise
        self.num_owed = max(0, self.num_owed - 1)
        return reply

    async def read_replies(self, num_replies: int) -> list[Reply]:
        """Read replies; an error reply is returned in its place, as an exception."""
        return [await self._read() for _ in range(num_replies)]

    async def _read(self) -> Reply:
        try:
            return await self.read_response(disable_decoding=True)
        except ResponseError as error:
            return error

    async def release(self) -> None:
        """Return to the pool."""
        await self.pool.release(self)

    async def drop(self) -> None:
        """Close, and return to the pool."""
        await self.disconnect(nowait=True)
        await self.release()


# ---------------------------------------------------------------- pools


class LeanPool(Base):
    """Mixin of a blocking pool that keeps only weak references to connections in use.

    If a signal handler ends a call before it has released its connection, the connection is garbage and is closed.
    """

    def reset(self) -> None:
        """Forget every connection, as after a fork."""
        super().reset()
        self._in_use_connections: WeakSet[Connection] = WeakSet()

    def get_connection(self, *_: object) -> Connection:
        """Take a connection that is connected, and that the server has not closed in the meantime."""
        self._checkpid()
        with self._lock:
            connection = self._available_connections.pop() if self._available_connections else self.make_connection()
            self._in_use_connections.add(connection)
        connection.pool = self
        try:
            if connection.is_connected and _is_over(connection):
                connection.disconnect()
            if not connection.is_connected:
                connection.connect()
        except BaseException:
            connection.release()
            raise
        return connection

    def release(self, connection: Connection) -> None:
        """Take a connection back; close it if replies are outstanding."""
        self._checkpid()
        if connection.pool is not self:
            return
        connection.pool = None
        if connection.num_owed:
            connection.disconnect()
        with self._lock:
            self._in_use_connections.discard(connection)
            if self.owns_connection(connection):
                self._available_connections.append(connection)
            else:  # from the process before a fork, or to the primary before a failover
                connection.disconnect()


def _is_over(connection: Connection) -> bool:
    try:
        return connection.can_read()
    except (RedisError, OSError):
        return True


class AsyncLeanPool(Base):
    """Mixin of an asyncio pool, as `LeanPool`."""

    async def get_connection(self, *_: object) -> Connection:
        """As `LeanPool.get_connection`."""
        connection = self._available_connections.pop() if self._available_connections else self.make_connection()
        self._in_use_connections.add(connection)
        connection.pool = self
        try:
            if connection.is_connected and await _is_over_async(connection):
                await connection.disconnect(nowait=True)
            if not connection.is_connected:
                await connection.connect()
        except BaseException:
            await connection.release()
            raise
        return connection

    async def release(self, connection: Connection) -> None:
        """As `LeanPool.release`."""
        if connection.pool is not self:
            return
        connection.pool = None
        if connection.num_owed:
            await connection.disconnect(nowait=True)
        self._in_use_connections.discard(connection)
        self._available_connections.append(connection)


async def _is_over_async(connection: Connection) -> bool:
    try:
        return await connection.can_read()
    except (RedisError, OSError):
        return True


_MIXED: dict[tuple[Any, Any], Any] = {}  # Any: redis-py's classes share no typed base


def mixed(mixin: Any, redis_class: Any) -> Any:  # noqa: ANN401  # as above
    """Return the subclass of a redis-py class with a mixin."""
    key = (mixin, redis_class)
    if key not in _MIXED:
        _MIXED[key] = type(f"{mixin.__name__}{redis_class.__name__}", key, {})
    return _MIXED[key]
