"""Links to the queue's server: `Link` blocks, `AsyncLink` serves event loops. `aio.py` has what they have in common."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf

from sluice.producer.operations.operation import Ask, Entries, Read, channel_entries
from sluice.producer.transport import hub
from sluice.producer.transport.aio import AsyncRunner
from sluice.producer.transport.blocking import Runner
from sluice.producer.transport.loops import ByLoop
from sluice.producer.transport.retries import LinkSettings, hung, too_late
from sluice.protocol.redis import pools, urls
from sluice.protocol.redis.connections import LAST_TRY_S, bounded, try_s
from sluice.protocol.redis.execution import Command, Reply
from sluice.protocol.redis.pools import ASYNCIO, BLOCKING, Pool, PoolClasses, Pools, sentinels_of
from sluice.protocol.redis.routing import slot_of

REPLY_TIMEOUT_S = 15.0
"""Longer than the longest BLOCK, so that a silent connection is found dead."""

CONNECT_TIMEOUT_S = 5.0

REPLY_SHARE = 0.75
CONNECT_SHARE = 0.4
"""Of the time that an asyncio client waits for a silent server. A round trip must end before its caller gives it up:
from its timeout the client learns to ask the next Sentinel, or for the slot map. Two Sentinels may be gone."""

BLOCK_SHARE = 0.5
"""A read blocks for at most this share of the longest wait for a reply, so that it is not taken for an outage."""

MAX_ASKS = 16
"""Round trips of one asyncio client at once, in addition to reads that block; to a Cluster, for each slot."""


def make_pool(url: str, classes: PoolClasses = BLOCKING, silence_s: float = inf) -> Pool:
    """Make a pool; it does not connect yet.

    Args:
        url: Of a server, or of one behind Sentinels.
        classes: `BLOCKING` or `ASYNCIO`.
        silence_s: When callers give up a round trip to a server that is silent.

    Raises:
        InvalidSetting: the URL cannot be read.
    """
    try:
        return pools.make_pool(
            url,
            classes,
            reply_timeout_s=min(REPLY_TIMEOUT_S, REPLY_SHARE * silence_s),
            connect_timeout_s=min(CONNECT_TIMEOUT_S, CONNECT_SHARE * silence_s),
            client_name="sluice-producer",
        )
    except ValueError as error:
        raise urls.cannot_read(url, error) from None


class Link(Runner):
    """A runner of operations that blocks, over pools of connections. Threads may share one.

    Raises:
        InvalidSetting: the URL cannot be read.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self._pools = Pools(make_pool)
        if not urls.is_cluster(settings.url):
            self._pools.of(settings.url)  # raises InvalidSetting now, not at the first ask
        super().__init__(settings, self._pools.of)

    def __repr__(self) -> str:
        return f"Link({self.settings!r})"

    def ask(self, ask: Ask) -> list[Reply]:
        """Send, and wait for the replies, until the deadline of the ask."""
        with bounded(ask.deadline_s):
            return super().ask(ask)

    def close(self) -> None:
        """Close every connection, those to the Sentinels too."""
        for pool in self._pools.all():
            pool.disconnect()
            for sentinel in sentinels_of(pool):
                sentinel.close()


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

    pools: Pools
    shares: dict[int | None, SlotShare] = field(default_factory=dict[int | None, SlotShare])

    async def close(self) -> None:
        """Stop reading, and close every connection, those to the Sentinels too."""
        await asyncio.gather(*(share.hub.close() for share in self.shares.values()))
        for pool in self.pools.all():
            await pool.disconnect()
            for sentinel in sentinels_of(pool):
                await sentinel.aclose()


class AsyncLink(AsyncRunner):
    """As `Link`, for asyncio; requests to several shards are sent at the same time.

    Each event loop that uses it has connections and shares of its own (`loops.py`), so threads may share one.
    """

    def __init__(self, settings: LinkSettings) -> None:
        # A submit waits for replicas for up to `patience_s`, and once more if the server lacks the script.
        self._silence_s = 2 * settings.patience_s + LAST_TRY_S
        self._max_block_ms = round(1000 * BLOCK_SHARE * min(REPLY_TIMEOUT_S, REPLY_SHARE * self._silence_s))
        make = partial(make_pool, classes=ASYNCIO, silence_s=self._silence_s)
        if not urls.is_cluster(settings.url):
            make(settings.url)  # as in Link
        self._loops = ByLoop(lambda: LoopLink(Pools(make)))
        super().__init__(settings, lambda url: self._loops.here().pools.of(url))

    def __repr__(self) -> str:
        return f"AsyncLink({self.settings!r})"

    async def ask(self, ask: Ask) -> list[Reply]:
        """Send, and wait for the replies; at most `MAX_ASKS` at once, so that a burst opens no more connections."""
        share = self._share(ask.commands[0])
        if ask.deadline_s is not None or self._silence_s >= REPLY_TIMEOUT_S:
            return await self._by_deadline(ask, self._ask_in_turn(ask, share))
        replies = await self._unless_silent(ask, share)
        share.note_answer()
        return replies

    async def ask_blocking(self, ask: Ask) -> list[Reply]:
        """Send a read that blocks at the server; it does not count against `MAX_ASKS`."""
        return await self._by_deadline(ask, super().ask(ask))

    async def read(self, read: Read) -> list[tuple[str, Entries]]:
        """Read channels; reads of one channel each share a round trip."""
        if len(read.cursors) == 1:
            [(channel, after)] = read.cursors.items()
            shared = self._share(("XREAD", channel)).hub
            entries = await _until(read.deadline_s, shared.read(channel, after, read.block_ms))
            return [(channel, entries)] if entries else []
        [reply] = await self.ask_blocking(read._replace(block_ms=min(read.block_ms, self._max_block_ms)).ask)
        return list(channel_entries(reply))

    async def close(self) -> None:
        """Stop reading, and close every connection, those to the Sentinels too.

        What other event loops have is closed by them, soon if they run.
        """
        await self._loops.close()

    async def _ask_in_turn(self, ask: Ask, share: SlotShare) -> list[Reply]:
        try:
            async with share.turns:
                return await super().ask(ask)
        except (KeyboardInterrupt, SystemExit):
            share.turns = asyncio.Semaphore(MAX_ASKS)  # the interrupt may have come before it gave back its turn
            raise

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
            raise too_late("timed out", self.settings.url) from error

    async def _unless_silent(self, ask: Ask, share: SlotShare) -> list[Reply]:
        """Wait for a round trip, and for its turn, until its server has been silent for too long.

        Its own time is not bounded: in a burst many asks wait for their turns while the server answers others. One that
        finds a host gone ends by the timeouts of its sockets, which are shorter, so that the next asks elsewhere.

        Raises:
            QueueUnreachable: the server keeps the connections and answers nothing, as one that has stopped does.
        """
        begin_s, task = time.monotonic(), asyncio.ensure_future(self._ask_in_turn(ask, share))
        try:
            while not task.done():
                left_s = max(begin_s, share.answered_s) + self._silence_s - time.monotonic()
                if left_s <= 0:
                    raise hung(self.settings, self._silence_s, is_repeatable=ask.is_repeatable)
                await asyncio.wait((task,), timeout=left_s)
        finally:
            if not task.done():
                task.cancel()
                task.add_done_callback(_forget)
        return task.result()

    def _share(self, command: Command) -> SlotShare:
        slot = slot_of(command) if urls.is_cluster(self.settings.url) else None
        shares = self._loops.here().shares
        if slot not in shares:
            shares[slot] = SlotShare(hub.Hub(self.ask_blocking, self._blocking_in_turn))
        return shares[slot]

    @asynccontextmanager
    async def _blocking_in_turn(self) -> AsyncGenerator[hub.Send]:
        """Yield an `ask_blocking` for one read after the other. It keeps its connection, except to a Cluster."""
        if urls.is_cluster(self.settings.url):
            yield self.ask_blocking
            return
        async with self.pipe() as pipe:

            async def ask_blocking(ask: Ask) -> list[Reply]:
                await pipe.send(ask)
                return await pipe.receive()

            yield ask_blocking


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
