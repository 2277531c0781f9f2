"""Links to the queue's server: `Link` blocks, `AsyncLink` is for asyncio. Their common base is in `aio.py`."""

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
"""Longest wait for a reply, in seconds; longer than the longest BLOCK, so that a dead connection is detected."""

CONNECT_TIMEOUT_S = 5.0

REPLY_SHARE = 0.75
CONNECT_SHARE = 0.4
"""Share of the time that an asyncio client waits for a silent server. A round trip must time out before its caller
gives up, so that the client asks the next Sentinel, or for the slot map. Two Sentinels may be down."""

BLOCK_SHARE = 0.5
"""Longest block of a read, as a share of the longest wait for a reply, so that it is not mistaken for an outage."""

MAX_ASKS = 16
"""Most concurrent round trips of one asyncio client, besides blocking reads; on a Cluster, for each slot."""


def make_pool(url: str, classes: PoolClasses = BLOCKING, silence_s: float = inf) -> Pool:
    """Create a pool; it does not connect yet.

    Args:
        url: The URL of a server, or of one behind Sentinels.
        classes: `BLOCKING` or `ASYNCIO`.
        silence_s: Time after which callers give up a round trip to a silent server.

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
    """A blocking runner of operations, with connection pools. Thread-safe.

    Raises:
        InvalidSetting: the URL cannot be read.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self._pools = Pools(make_pool)
        if not urls.is_cluster(settings.url):
            self._pools.of(settings.url)  # so that InvalidSetting is raised now, not at the first ask
        super().__init__(settings, self._pools.of)

    def __repr__(self) -> str:
        return f"Link({self.settings!r})"

    def ask(self, ask: Ask) -> list[Reply]:
        """Send the commands, and wait for the replies until the deadline of the ask."""
        with bounded(ask.deadline_s):
            return super().ask(ask)

    def close(self) -> None:
        """Close all connections, including those to Sentinels."""
        for pool in self._pools.all():
            pool.disconnect()
            for sentinel in sentinels_of(pool):
                sentinel.close()


@dataclass(slots=True, eq=False)
class SlotShare:
    """The shared state of the asks of one slot, so that an unreachable shard delays only its own asks.

    Changes with each answer.
    """

    hub: hub.Hub
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_ASKS))
    answered_s: float = field(default=float("-inf"), init=False)
    """When an ask was last answered, on the monotonic clock."""

    def note_answer(self) -> None:
        """Record that an ask was answered now."""
        self.answered_s = time.monotonic()


@dataclass(slots=True, eq=False)
class LoopLink:
    """The state of an `AsyncLink` for one event loop. Changes with asks."""

    pools: Pools
    shares: dict[int | None, SlotShare] = field(default_factory=dict[int | None, SlotShare])

    async def close(self) -> None:
        """Stop reading, and close all connections, including those to Sentinels."""
        await asyncio.gather(*(share.hub.close() for share in self.shares.values()))
        for pool in self.pools.all():
            await pool.disconnect()
            for sentinel in sentinels_of(pool):
                await sentinel.aclose()


class AsyncLink(AsyncRunner):
    """As `Link`, for asyncio; requests to several shards are sent concurrently.

    Each event loop has its own connections and shares (`loops.py`). Thread-safe.
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
        """Send the commands, and wait for the replies; at most `MAX_ASKS` at once, to bound the connections."""
        share = self._share(ask.commands[0])
        if ask.deadline_s is not None or self._silence_s >= REPLY_TIMEOUT_S:
            return await self._by_deadline(ask, self._ask_in_turn(ask, share))
        replies = await self._unless_silent(ask, share)
        share.note_answer()
        return replies

    async def ask_blocking(self, ask: Ask) -> list[Reply]:
        """Send a read that blocks on the server; it does not count towards `MAX_ASKS`."""
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
        """Stop reading, and close all connections, including those to Sentinels.

        Other event loops close their own, soon if they run.
        """
        await self._loops.close()

    async def _ask_in_turn(self, ask: Ask, share: SlotShare) -> list[Reply]:
        try:
            async with share.turns:
                return await super().ask(ask)
        except (KeyboardInterrupt, SystemExit):
            share.turns = asyncio.Semaphore(MAX_ASKS)  # an interrupt may have prevented that it released its turn
            raise

    async def _by_deadline(self, ask: Ask, asking: Coroutine[None, None, list[Reply]]) -> list[Reply]:
        """Wait for a turn and a round trip, until soon after the deadline of the ask."""
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
        """Wait for a turn and a round trip, until the server has been silent for too long.

        The time of the ask itself is not bounded: in a burst, many wait for their turns while the server answers
        others. If a host is down, an ask ends by the timeouts of its sockets, which are shorter, so that the next
        asks elsewhere.

        Raises:
            QueueUnreachable: the server keeps connections open but does not answer, as a stopped process does.
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
        """Yield an `ask_blocking` for consecutive reads, which keeps its connection, except on a Cluster."""
        if urls.is_cluster(self.settings.url):
            yield self.ask_blocking
            return
        async with self.pipe() as pipe:

            async def ask_blocking(ask: Ask) -> list[Reply]:
                await pipe.send(ask)
                return await pipe.receive()

            yield ask_blocking


def _forget(task: asyncio.Future[list[Reply]]) -> None:
    """Retrieve the error of a task that is no longer awaited."""
    if not task.cancelled():
        task.exception()


async def _until(deadline_s: float | None, reading: Coroutine[None, None, Entries]) -> Entries:
    """Return the entries of a shared read before a deadline, although the hub may wait longer for the server."""
    if deadline_s is None:
        return await reading
    try:
        return await asyncio.wait_for(reading, max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        return []
