"""redis-py's connections, made safe for calls that end anywhere: by a signal handler that raises, by a cancellation.

A connection counts the replies that it is owed, its handshake included. One that is owed any when it is taken from its
pool is closed and connected anew, so no reply reaches a call that did not ask for it. The count changes before a
command is sent and after its reply is read, so an exception between any two steps leaves it too high, never too low.
"""

# What redis-py's classes inherit is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, cast
from weakref import WeakSet

import hiredis
from redis.exceptions import DataError, ResponseError

from sluice.protocol.redis.execution import Command

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


Base: Any = object  # Any: the classes below are mixed into redis-py's


class Guard(Base):
    """What a blocking connection does in addition. Changes with each command and reply."""

    num_owed = 0
    """Replies that were asked for and not read; a handshake under way counts as one."""

    def connect(self) -> None:
        """Connect, unless it is connected and owed nothing."""
        if self.num_owed:
            self.disconnect()
        if self.is_connected:
            return
        self.num_owed += 1
        try:
            super().connect()
        except BaseException:
            self.disconnect()
            raise
        self.num_owed -= 1

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


class AsyncGuard(Base):
    """What an asyncio connection does in addition. Changes as `Guard`."""

    num_owed = 0
    """As in `Guard`."""

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
        """Send several commands. redis-py packs them in Python on asyncio, which takes ten times as long."""
        self.num_owed += len(commands)
        await self.send_packed_command(b"".join(map(pack, commands)))

    async def read_response(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # as above
        """Read one reply."""
        try:
            reply = await super().read_response(*args, **options)
        except ResponseError:
            self.num_owed = max(0, self.num_owed - 1)
            raise
        self.num_owed = max(0, self.num_owed - 1)
        return reply


@cache
def guarded(connection_class: Connection) -> Connection:
    """Return a class of blocking connections that count the replies they are owed."""
    return type(f"Guarded{connection_class.__name__}", (Guard, connection_class), {})


@cache
def guarded_async(connection_class: Connection) -> Connection:
    """Return a class of asyncio connections that count the replies they are owed."""
    return type(f"Guarded{connection_class.__name__}", (AsyncGuard, connection_class), {})


class Forgetting(Base):
    """What a blocking pool does in addition: it holds connections in use weakly.

    A call that a signal handler ends before it releases its connection drops it, and the connection closes.
    """

    def reset(self) -> None:
        """Forget every connection, as after a fork."""
        super().reset()
        self._in_use_connections: WeakSet[Connection] = WeakSet()


@cache
def forgetting(pool_class: Any) -> Any:  # noqa: ANN401  # redis-py's pools share no typed base
    """Return a class of blocking pools that hold connections in use weakly."""
    return type(f"Forgetting{pool_class.__name__}", (Forgetting, pool_class), {})
