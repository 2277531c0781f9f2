"""redis-py's connections and pools, made safe for calls that end anywhere: by a signal handler, by a cancellation.

A connection counts the replies that it is owed, its handshake included. One that is owed any when it returns to its
pool is closed, so no reply reaches a call that did not ask for it. The count changes before a command is sent and after
its reply is read, so an exception between any two steps leaves it too high, never too low.

A pool takes and returns a connection in a few steps. Those of redis-py keep the books of its metrics, which costs as
much processor time as a round trip.
"""

# What redis-py's classes inherit is untyped.
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
"""How long a round trip may last after its deadline: the last look at a job begins at the deadline."""

Connection = Any  # redis-py's connections share no typed base
untyped_hiredis: Any = hiredis  # Any: its types have commands of one word


def pack(command: Command) -> bytes:
    """Encode a command for the wire.

    Numbers are written here, not by hiredis: it takes their `repr`, which runs a signal handler that is due, and if
    that raises, hiredis 3.5 goes on with the missing text and ends the process with SIGSEGV.

    Raises:
        DataError: an argument is no text, bytes or number.
    """
    # Compared by type: a submit has thousands of arguments, and hardly any is a number.
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
    return repr(argument) if type(argument) is int else argument  # hiredis refuses others, a bool too


class Packer:
    """What a redis-py connection packs commands with."""

    def pack(self, *command: Any) -> list[bytes]:  # noqa: ANN401  # as redis-py has it
        """Encode a command, whose name may have two words."""
        name, *arguments = command
        words = (name.encode() if isinstance(name, str) else name).split()
        return [pack((*words, *arguments))]


# ---------------------------------------------------------------- deadlines of blocking round trips

_deadline_s: ContextVar[float | None] = ContextVar("deadline of a round trip", default=None)


def try_s(deadline_s: float) -> float:
    """Return how long a round trip with this deadline may last that begins now."""
    return max(0.0, deadline_s - monotonic()) + LAST_TRY_S


@contextmanager
def bounded(deadline_s: float | None) -> Generator[None]:
    """Bound what this thread connects to and reads from by a deadline: a connection has one time-out for all."""
    before_s = _deadline_s.get()
    try:
        _deadline_s.set(deadline_s)  # inside, so that a signal handler that raises leaves no deadline behind
        yield
    finally:
        _deadline_s.set(before_s)


def _left_s() -> float | None:
    """Return how long this thread may wait now; None: as long as the socket's own time-out."""
    deadline_s = _deadline_s.get()
    return None if deadline_s is None else try_s(deadline_s)


# ---------------------------------------------------------------- connections

Base: Any = object  # Any: the classes below are mixed into redis-py's


class Guard(Base):
    """What a blocking connection does in addition. Changes with each command and reply."""

    num_owed = 0
    """Replies that were asked for and not read; a handshake under way counts as one."""

    pool: Any = None  # redis-py's pools share no typed base
    """The pool to which it returns, while it is in use."""

    def connect(self) -> None:
        """Connect, unless it is connected and owed nothing."""
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
        # The socket and the parser have copied the shorter one; -1 is the connection's own.
        self.update_current_socket_timeout(-1)

    def disconnect(self, *args: Any, **options: Any) -> None:  # noqa: ANN401  # as redis-py has it
        """Disconnect: it is owed nothing any more."""
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
        self.num_owed = max(0, self.num_owed - 1)  # a subscription brings more messages than commands
        return reply

    def send_commands(self, commands: Sequence[Command]) -> None:
        """Send several commands."""
        self.send_packed_command(self.pack_commands(commands))

    def read_replies(self, num_replies: int) -> list[Reply]:
        """Read replies; an error reply is an exception in its place."""
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
    """What an asyncio connection does in addition. Changes as `Guard`."""

    num_owed = 0
    pool: Any = None  # as in `Guard`

    async def connect(self) -> None:
        """Connect, unless it is connected and owed nothing."""
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
        """Disconnect: it is owed nothing any more."""
        await super().disconnect(*args, **options)
        self.num_owed = 0

    async def send_command(self, *args: Any, **options: Any) -> None:  # noqa: ANN401  # as above
        """Send one command."""
        self.num_owed += 1
        await super().send_command(*args, **options)

    async def send_commands(self, commands: Sequence[Command]) -> None:
        """Send several commands, and raise a cancellation that redis-py loses.

        It sends within `asyncio.wait_for`, which before Python 3.12 drops a cancellation that arrives just as the send
        ends: a reader would continue although its task was cancelled.
        """
        task = asyncio.current_task()
        assert task is not None
        num_cancellations = task.cancelling()
        self.num_owed += len(commands)
        # redis-py packs them in Python on asyncio, which takes ten times as long.
        await self.send_packed_command(b"".join(map(pack, commands)))
        if task.cancelling() > num_cancellations:
            await self.disconnect(nowait=True)  # its reply will not be read
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
        """Read replies; an error reply is an exception in its place."""
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
    """What a blocking pool does otherwise. It holds connections in use weakly.

    A call that a signal handler ends before it releases its connection drops it, and the connection closes.
    """

    def reset(self) -> None:
        """Forget every connection, as after a fork."""
        super().reset()
        self._in_use_connections: WeakSet[Connection] = WeakSet()

    def get_connection(self, *_: object) -> Connection:
        """Take a connection that is connected, and that the server has not closed meanwhile."""
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
        """Take a connection back, closed if it is owed replies."""
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
            else:  # of the process before a fork, or of the primary before a failover
                connection.disconnect()


def _is_over(connection: Connection) -> bool:
    try:
        return connection.can_read()
    except (RedisError, OSError):
        return True


class AsyncLeanPool(Base):
    """What an asyncio pool does otherwise."""

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
    """Return the class of redis-py's that does as a mixin does."""
    key = (mixin, redis_class)
    if key not in _MIXED:
        _MIXED[key] = type(f"{mixin.__name__}{redis_class.__name__}", key, {})
    return _MIXED[key]
