"""Links to the queue's server: they run operations, and carry out what the routines of `server.py` and `cluster.py` do.

`Link` blocks and `AsyncLink` awaits; neither decides anything.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from sluice.producer.operations.channels import channel_entries
from sluice.producer.operations.operation import LAST_TRY_S, Ask, Entries, Read, Sleep, try_s
from sluice.producer.transport import bounds, hub
from sluice.producer.transport.actions import (
    Action,
    Connect,
    Connection,
    Receive,
    Release,
    Routine,
    Send,
    SendAndReceive,
    Transfer,
)
from sluice.producer.transport.cluster import Cluster, ClusterPipe
from sluice.producer.transport.loops import ByLoop
from sluice.producer.transport.pools import (
    REPLY_TIMEOUT_S,
    Pool,
    Pools,
    make_async_pool,
    make_pool,
    reply_timeout_s,
    sentinels_of,
)
from sluice.producer.transport.retries import LinkSettings, hung, too_late
from sluice.producer.transport.server import Server, ServerPipe
from sluice.protocol.redis.drivers import drive, drive_async
from sluice.protocol.redis.error_kinds import CONNECTION_ERRORS
from sluice.protocol.redis.execution import Command, Reply
from sluice.protocol.redis.slot_table import slot_of
from sluice.protocol.redis.urls import is_cluster

MAX_ASKS = 16
"""Round trips of one asyncio client at once, in addition to reads that block; to a Cluster, for each slot."""

BLOCK_SHARE = 0.5
"""A read blocks for at most this share of the longest wait for a reply, so that it is not taken for an outage."""

Result = TypeVar("Result")


def _endpoint(settings: LinkSettings) -> Server | Cluster:
    return Cluster(settings) if is_cluster(settings.url) else Server(settings)


# ---------------------------------------------------------------- blocking


class Link:
    """A maker of round trips over pools of connections, each on a separate connection. Threads may share one.

    Raises:
        InvalidSetting: the URL cannot be read.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self._endpoint = _endpoint(settings)
        self._pools = Pools(make_pool)
        if isinstance(self._endpoint, Server):
            self._pools.of(settings.url)  # raises InvalidSetting now, not at the first ask

    def __repr__(self) -> str:
        return f"Link({self._endpoint.settings!r})"

    def ask(self, ask: Ask) -> list[Reply]:
        """Send, and wait for the replies.

        Raises:
            QueueUnreachable: the server did not answer for longer than `patience_s`.
            ResultTimeout: it did not by the deadline of the ask.
            QueueRefused, QueueFull: it refuses the command.
        """
        with bounds.bounded(ask.deadline_s):
            return self.run(self._endpoint.ask(ask))

    @contextmanager
    def pipe(self) -> Generator["Pipe"]:
        """Open a connection on which asks are sent ahead of their replies; to a Cluster, they are sent one by one."""
        pipe = Pipe(self, self._endpoint.pipe())
        try:
            yield pipe
        finally:
            pipe.close()

    def close(self) -> None:
        """Close every connection, those to the Sentinels too."""
        for pool in self._pools.all():
            pool.disconnect()
            for sentinel in sentinels_of(pool):
                sentinel.close()

    def run(self, routine: Routine[Result], replies: list[Reply] | None = None) -> Result:
        """Run an operation or another routine to its result; `replies` answer the ask at which it stopped, if any."""
        return drive(routine, self.perform, replies)

    def perform(self, action: Action) -> Any:  # noqa: ANN401  # each action has its own result
        """Carry out one action."""
        match action:
            case Ask():
                return self.ask(action)
            case Read():
                [reply] = self.ask(action.ask)
                return list(channel_entries(reply))
            case Sleep(seconds):
                time.sleep(seconds)
            case _:
                return self._transfer(action)
        return None

    def _transfer(self, action: Transfer) -> Any:  # noqa: ANN401  # as above
        match action:
            case SendAndReceive(connection, commands):
                _send(connection, commands)
                return _receive(connection, len(commands))
            case Connect(url):
                pool = self._pools.of(url)
                return Connection(self._connect(pool), pool)
            case Release(connection, is_broken):
                _release(connection, is_broken=is_broken)
            case Send(connection, commands):
                _send(connection, commands)
            case Receive(connection, num_replies):
                return _receive(connection, num_replies)
        return None

    def _connect(self, pool: Pool) -> Any:  # noqa: ANN401  # redis-py's connections share no typed base
        revive = self._endpoint.settings.revive
        try:
            return pool.get_connection()
        except CONNECTION_ERRORS:
            if revive is None:
                raise
            revive()
            return pool.get_connection()


def _release(taken: Connection, *, is_broken: bool) -> None:
    if is_broken or taken.connection.num_owed:
        taken.connection.disconnect()
    taken.pool.release(taken.connection)


def _send(taken: Connection, commands: Sequence[Command]) -> None:
    taken.connection.send_packed_command(taken.connection.pack_commands(commands))


def _receive(taken: Connection, num_replies: int) -> list[Reply]:
    return [_read(taken) for _ in range(num_replies)]


def _read(taken: Connection) -> Reply:
    bound = {} if (left_s := bounds.left_s()) is None else {"timeout": left_s}
    try:
        return taken.connection.read_response(disable_decoding=True, **bound)
    except ResponseError as error:
        return error


class Pipe:
    """Asks in flight, answered in order."""

    def __init__(self, link: Link, pipe: ServerPipe | ClusterPipe) -> None:
        self._link = link
        self._pipe = pipe

    @property
    def is_full(self) -> bool:
        """Whether a reply should be read before more is sent."""
        return self._pipe.is_full

    def send(self, ask: Ask) -> None:
        """Send without waiting for the replies."""
        self._link.run(self._pipe.send(ask))

    def receive(self) -> list[Reply]:
        """Wait for the replies to the oldest ask in flight.

        Raises:
            QueueUnreachable, QueueRefused, QueueFull: as in `Link.ask`.
        """
        return self._link.run(self._pipe.receive())

    def close(self) -> None:
        """Release the connection; close it if replies are still to come."""
        self._link.run(self._pipe.close())


# ---------------------------------------------------------------- on asyncio


@dataclass(slots=True, eq=False)
class SlotShare:
    """What the asks of one slot share, so that a shard that does not answer holds up its own only.

    Changes with each answer.
    """

    hub: hub.Hub
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_ASKS))
    answered_s: float = field(default=float("-inf"), init=False)
    """When an ask was answered last, by the monotonic clock."""

    def note_answer(self) -> None:
        """Note that an ask was answered now."""
        self.answered_s = time.monotonic()


@dataclass(slots=True, eq=False)
class LoopLink:
    """What one event loop has of an `AsyncLink`. Changes as asks need more of it."""

    make_pool: Callable[[str], Pool]
    pools: Pools = field(init=False)
    shares: dict[int | None, SlotShare] = field(default_factory=dict[int | None, SlotShare])
    _left: list[Pools] = field(default_factory=list[Pools], init=False)
    _closing: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.pools = Pools(self.make_pool)

    def start_over(self) -> None:
        """Take new pools and turns: an interrupted ask gives back neither a lock nor a turn. Others end as they are."""
        self._left.append(self.pools)
        self.pools = Pools(self.make_pool)
        for share in self.shares.values():
            share.turns = asyncio.Semaphore(MAX_ASKS)
        self._closing = asyncio.ensure_future(self._close_left(is_end=False))

    async def close(self) -> None:
        """Stop reading, and close every connection, those to the Sentinels too."""
        await asyncio.gather(*(share.hub.close() for share in self.shares.values()))
        self._left.append(self.pools)
        await self._close_left(is_end=True)

    async def _close_left(self, *, is_end: bool) -> None:
        """Close the connections of pools that no ask will use; unless it is the end, some may be in use still.

        Pools without such a connection are dropped.
        """
        for pools in list(self._left):
            is_over = is_end or not any(map(_has_connection_in_use, pools.all()))
            for pool in pools.all():
                await pool.disconnect(inuse_connections=is_end)
                for sentinel in sentinels_of(pool) if is_over else ():
                    await sentinel.aclose()
            if is_over and pools in self._left:
                self._left.remove(pools)


def _has_connection_in_use(pool: Pool) -> bool:
    return bool(pool._in_use_connections)  # redis-py has no public way to ask for it


class AsyncLink:
    """As `Link`, for asyncio; requests to several shards are sent at the same time.

    Each event loop that uses it has connections and shares of its own (`loops.py`), so threads may share one.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self._endpoint = _endpoint(settings)
        # A submit waits for replicas for up to `patience_s`, and once more if the server lacks the script.
        self._silence_s = 2 * settings.patience_s + LAST_TRY_S
        self._max_block_ms = round(1000 * BLOCK_SHARE * reply_timeout_s(self._silence_s))
        self._make_pool = partial(make_async_pool, silence_s=self._silence_s)
        if isinstance(self._endpoint, Server):
            self._make_pool(settings.url)  # as in Link
        self._loops = ByLoop(lambda: LoopLink(self._make_pool))

    def __repr__(self) -> str:
        return f"AsyncLink({self._endpoint.settings!r})"

    async def ask(self, ask: Ask) -> list[Reply]:
        """Send, and wait for the replies; at most `MAX_ASKS` at once, so that a burst opens no more connections.

        Raises:
            QueueUnreachable, QueueRefused, QueueFull, ResultTimeout: as in `Link.ask`.
        """
        asking = self.run_bounded(self._endpoint.ask(ask), ask.commands[0])
        if ask.deadline_s is not None or self._silence_s >= REPLY_TIMEOUT_S:
            return await self._by_deadline(ask, asking)
        share = self._share(ask.commands[0])
        replies = await self._unless_silent(ask, share, asking)
        share.note_answer()
        return replies

    async def _unless_silent(
        self, ask: Ask, share: SlotShare, asking: Coroutine[None, None, list[Reply]]
    ) -> list[Reply]:
        """Wait for a round trip, and for its turn, until its server has been silent for too long.

        Its own time is not bounded: in a burst many asks wait for their turns while the server answers others. One that
        finds a host gone ends by the timeouts of its sockets, which are shorter, so that the next asks elsewhere.

        Raises:
            QueueUnreachable: the server keeps the connections and answers nothing, as one that has stopped does.
        """
        begin_s, task = time.monotonic(), asyncio.ensure_future(asking)
        try:
            while not task.done():
                left_s = max(begin_s, share.answered_s) + self._silence_s - time.monotonic()
                if left_s <= 0:
                    raise hung(self._endpoint.settings, self._silence_s, is_repeatable=ask.is_repeatable)
                await asyncio.wait((task,), timeout=left_s)
        finally:
            if not task.done():
                task.cancel()
                task.add_done_callback(_forget)
        return task.result()

    async def ask_blocking(self, ask: Ask) -> list[Reply]:
        """Send a read that blocks at the server; it does not count against `MAX_ASKS`."""
        return await self._by_deadline(ask, self.run(self._endpoint.ask(ask)))

    async def _by_deadline(self, ask: Ask, asking: Coroutine[None, None, list[Reply]]) -> list[Reply]:
        """Wait for a round trip, and for its turn, until soon after the deadline of the ask."""
        if ask.deadline_s is None:
            return await asking
        bound = asyncio.timeout(try_s(ask.deadline_s))
        try:
            async with bound:
                return await asking
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise too_late("timed out", self._endpoint.settings.url) from error

    @asynccontextmanager
    async def _blocking_in_turn(self) -> AsyncGenerator[hub.Send]:
        """Yield an `ask_blocking` for one read after the other. It keeps its connection, except to a Cluster."""
        if isinstance(self._endpoint, Cluster):
            yield self.ask_blocking
            return
        async with self.pipe() as pipe:

            async def ask_blocking(ask: Ask) -> list[Reply]:
                await pipe.send(ask)
                return await pipe.receive()

            yield ask_blocking

    @asynccontextmanager
    async def pipe(self) -> AsyncGenerator["AsyncPipe"]:
        """As `Link.pipe`."""
        pipe = AsyncPipe(self, self._endpoint.pipe())
        try:
            yield pipe
        finally:
            await pipe.close()

    async def close(self) -> None:
        """Stop reading, and close every connection, those to the Sentinels too.

        What other event loops have is closed by them, soon if they run.
        """
        await self._loops.close()

    async def run_bounded(self, routine: Routine[Result], command: Command = ()) -> Result:
        """Run a routine to its result, as one of at most `MAX_ASKS` for the slot of a command."""
        async with self._share(command).turns:
            return await self.run(routine)

    async def run(self, routine: Routine[Result], replies: list[Reply] | None = None) -> Result:
        """As `Link.run`."""
        return await drive_async(routine, self.perform, replies)

    async def perform(self, action: Action) -> Any:  # noqa: ANN401  # as in Link
        """Carry out one action; reads of one channel share a round trip."""
        try:
            match action:
                case Ask():
                    return await self.ask(action)
                case Read():
                    return await self._read(action)
                case Sleep(seconds):
                    await asyncio.sleep(seconds)
                case _:
                    return await self._transfer(action)
        except (KeyboardInterrupt, SystemExit):
            self._loops.here().start_over()
            raise
        return None

    async def _transfer(self, action: Transfer) -> Any:  # noqa: ANN401  # as above
        match action:
            case SendAndReceive(connection, commands):
                await _send_async(connection, commands)
                return await _receive_async(connection, len(commands))
            case Connect(url):
                pool = self._loops.here().pools.of(url)
                return Connection(await self._connect(pool), pool)
            case Release(connection, is_broken):
                await _release_async(connection, is_broken=is_broken)
            case Send(connection, commands):
                await _send_async(connection, commands)
            case Receive(connection, num_replies):
                return await _receive_async(connection, num_replies)
        return None

    async def _read(self, read: Read) -> list[tuple[str, Entries]]:
        if len(read.cursors) == 1:
            [(channel, after)] = read.cursors.items()
            entries = await _until(
                read.deadline_s, self._share(("XREAD", channel)).hub.read(channel, after, read.block_ms)
            )
            return [(channel, entries)] if entries else []
        [reply] = await self.ask_blocking(read._replace(block_ms=min(read.block_ms, self._max_block_ms)).ask)
        return list(channel_entries(reply))

    def _share(self, command: Command) -> SlotShare:
        slot = slot_of(command) if isinstance(self._endpoint, Cluster) else None
        shares = self._loops.here().shares
        if slot not in shares:
            shares[slot] = SlotShare(hub.Hub(self.ask_blocking, self._blocking_in_turn))
        return shares[slot]

    async def _connect(self, pool: Pool) -> Any:  # noqa: ANN401  # as in Link
        revive = self._endpoint.settings.revive
        try:
            return await pool.get_connection()
        except CONNECTION_ERRORS:
            if revive is None:
                raise
            await asyncio.to_thread(revive)
            return await pool.get_connection()


def _forget(task: asyncio.Future[list[Reply]]) -> None:
    """Take the error of a task that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


async def _until(deadline_s: float | None, reading: Coroutine[None, None, Entries]) -> Entries:
    """Return what a shared read finds before a deadline: the hub may wait for the server for longer."""
    if deadline_s is None:
        return await reading
    try:
        return await asyncio.wait_for(reading, max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        return []


async def _release_async(taken: Connection, *, is_broken: bool) -> None:
    if is_broken or taken.connection.num_owed:
        await taken.connection.disconnect(nowait=True)
    await taken.pool.release(taken.connection)


async def _send_async(taken: Connection, commands: Sequence[Command]) -> None:
    """Send, and raise a cancellation that redis-py loses.

    It sends within `asyncio.wait_for`, which before Python 3.12 drops a cancellation that arrives just as the send
    ends: a reader would continue although its task was cancelled.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancellations = task.cancelling()
    await taken.connection.send_commands(commands)
    if task.cancelling() > num_cancellations:
        await taken.connection.disconnect(nowait=True)  # its reply will not be read
        raise asyncio.CancelledError


async def _receive_async(taken: Connection, num_replies: int) -> list[Reply]:
    return [await _read_async(taken) for _ in range(num_replies)]


async def _read_async(taken: Connection) -> Reply:
    try:
        return await taken.connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error


class AsyncPipe:
    """As `Pipe`, for asyncio."""

    def __init__(self, link: AsyncLink, pipe: ServerPipe | ClusterPipe) -> None:
        self._link = link
        self._pipe = pipe

    @property
    def is_full(self) -> bool:
        """Whether a reply should be read before more is sent."""
        return self._pipe.is_full

    async def send(self, ask: Ask) -> None:
        """Send without waiting for the replies."""
        await self._link.run(self._pipe.send(ask))

    async def receive(self) -> list[Reply]:
        """As `Pipe.receive`; without a separate connection it counts against `MAX_ASKS`."""
        run = self._link.run if self._pipe.has_connection else self._link.run_bounded
        return await run(self._pipe.receive())

    async def close(self) -> None:
        """Release the connection; close it if replies are still to come."""
        await self._link.run(self._pipe.close())
