"""Links to a Redis Cluster: a link to each shard, and each command goes to the shard of its partition.

A shard that is away, or a slot that moved, makes us ask anew who serves what; what was refused as moved was not carried
out, and is sent where it belongs. All else is as in `links.py`: repeated at our level alone, where that is safe.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import cast

from redis.exceptions import ConnectionError as RedisConnectionError

from producer import config
from producer.commands import Ask, Command, Reply
from producer.contract.cluster import (
    LOOK,
    MAX_MOVES,
    Address,
    Part,
    SlotTable,
    Trip,
    block_s,
    is_cluster,
    read_url,
    spread,
)
from producer.errors import InvalidSetting
from producer.links import AWAY, HOPELESS, MAX_ASKS, AsyncLink, Link, LinkSettings, Patience, checked

LOOK_AGAIN_S = 0.02
"""A read of channels on several shards cannot block: it looks again after this long."""


class Shards:
    """What a cluster's link knows: where to ask, and who serves what. Changes with what it hears."""

    def __init__(self, settings: LinkSettings) -> None:
        try:
            self._url = read_url(settings.url)
        except ValueError as error:
            problem = f"cannot read the URL {config.redacted(settings.url)!r}: {error}. {config.HOW}"
            raise InvalidSetting(problem) from error
        self.settings = settings
        self.table: SlotTable | None = None
        self.has_connected = False

    def settings_of(self, address: Address) -> LinkSettings:
        """Of one node's link."""
        return LinkSettings(self._url.url_of(address), self.settings.patience_s)

    def candidates(self) -> list[Address]:
        """Whom to ask who serves what, those known to serve first."""
        known = self.table.addresses if self.table else []
        return list(dict.fromkeys((*known, *self._url.seeds)))

    def learn(self, reply: Reply, asked: Address) -> SlotTable:
        """Take a node's answer to `LOOK`.

        Raises:
            InvalidSetting: it is no Cluster's.
            RedisConnectionError: nobody serves anything.
        """
        try:
            table = SlotTable.read(reply, asked)
        except ValueError as error:
            raise InvalidSetting(f"{config.redacted(self.settings.url)}: {error}.") from error
        if not table.addresses:
            raise RedisConnectionError("CLUSTERDOWN nobody serves any slot")
        self.table, self.has_connected = table, True
        return table

    def patience(self) -> Patience:
        """A fresh count of tries."""
        return Patience(self.settings, self.has_connected, time.monotonic())

    def next_delay_s(self, patience: Patience, error: Exception, ask: Ask) -> float:
        """As `Patience.next_delay_s`; who serves what is asked anew."""
        self.table = None
        return patience.next_delay_s(error, is_repeatable=ask.is_repeatable)


def _of_part(ask: Ask, part: Part) -> Ask:
    return replace(ask, commands=part.commands)


def _moves() -> RedisConnectionError:
    return RedisConnectionError(f"slots moved {MAX_MOVES} times in one round trip")


def _has_news(replies: Sequence[Reply]) -> bool:
    return any(reply for reply in replies)


def _together(replies: Sequence[Reply]) -> list[Reply]:
    """Replies to the XREADs of several slots as one."""
    return [[row for reply in replies if isinstance(reply, list) for row in reply] or None]  # pyright: ignore[reportUnknownVariableType]  # redis's own reply


class ClusterLink:
    """As `Link`, for a Cluster."""

    def __init__(self, settings: LinkSettings) -> None:
        self._shards = Shards(settings)
        self._links: dict[Address, Link] = {}

    def __repr__(self) -> str:
        return f"ClusterLink({self._shards.settings!r})"

    def ask(self, ask: Ask) -> list[Reply]:
        """As `Link.ask`."""
        if ask.commands[0][0] == "SCAN":
            return [_scanned(ask.commands[0], self._scan)]
        cut = spread(ask.commands[0])
        return self._ask(ask) if len(cut) == 1 else self._read(cut, block_s(ask.commands[0]))

    @contextmanager
    def pipe(self) -> Generator["ClusterPipe"]:
        """As `Link.pipe`, but nothing is sent ahead."""
        yield ClusterPipe(self)

    def close(self) -> None:
        """Close every connection."""
        for link in self._links.values():
            link.close()

    def _ask(self, ask: Ask) -> list[Reply]:
        patience = self._shards.patience()
        while True:
            try:
                return checked(ask, self._try(ask), self._shards.settings.url)
            except AWAY + HOPELESS as error:
                time.sleep(self._shards.next_delay_s(patience, error, ask))

    def _read(self, commands: Sequence[Command], wait_s: float) -> list[Reply]:
        until_s = time.monotonic() + wait_s
        while not _has_news(found := self._ask(Ask(tuple(commands)))) and time.monotonic() < until_s:
            time.sleep(LOOK_AGAIN_S)
        return _together(found)

    def _try(self, ask: Ask) -> list[Reply]:
        trip = Trip(ask.commands)
        for _ in range(MAX_MOVES):
            for part in trip.parts(self._shards.table or self._look()):
                trip.heard(part, self._link(part.address).exchange(_of_part(ask, part)))
            if trip.is_done:
                return trip.answer()
            self._shards.table = None
        raise _moves()

    def _scan(self, command: Command, shard: int) -> tuple[Reply, int]:
        addresses = (self._shards.table or self._look()).addresses
        [reply] = self._link(addresses[shard]).ask(Ask((command,)))
        return reply, len(addresses)

    def _look(self) -> SlotTable:
        problem: Exception | None = None
        for address in self._shards.candidates():
            try:
                [reply] = self._link(address).exchange(Ask((LOOK,)))
                return self._shards.learn(reply, address)
            except AWAY as error:
                problem = error
        raise problem or _moves()

    def _link(self, address: Address) -> Link:
        if address not in self._links:
            self._links[address] = Link(self._shards.settings_of(address))
        return self._links[address]


class ClusterPipe:
    """As `Pipe`, but each ask is sent when its replies are wanted."""

    def __init__(self, link: ClusterLink) -> None:
        self._link = link
        self._waiting: deque[Ask] = deque()

    @property
    def is_full(self) -> bool:
        """Whether a reply should be read before more is sent."""
        return bool(self._waiting)

    def send(self, ask: Ask) -> None:
        """Remember what to send."""
        self._waiting.append(ask)

    def receive(self) -> list[Reply]:
        """Send the oldest, and wait for its replies; as `Link.ask`."""
        return self._link.ask(self._waiting.popleft())


class AsyncClusterLink:
    """As `AsyncLink`, for a Cluster; shards are asked at the same time."""

    def __init__(self, settings: LinkSettings) -> None:
        self._shards = Shards(settings)
        self._links: dict[Address, AsyncLink] = {}
        self._slots = asyncio.Semaphore(MAX_ASKS)

    def __repr__(self) -> str:
        return f"AsyncClusterLink({self._shards.settings!r})"

    async def ask(self, ask: Ask) -> list[Reply]:
        """As `AsyncLink.ask`."""
        async with self._slots:
            return await self.ask_blocking(ask)

    async def ask_blocking(self, ask: Ask) -> list[Reply]:
        """As `AsyncLink.ask_blocking`."""
        if ask.commands[0][0] == "SCAN":
            return [await _scanned_async(ask.commands[0], self._scan)]
        cut = spread(ask.commands[0])
        return await self._ask(ask) if len(cut) == 1 else await self._read(cut, block_s(ask.commands[0]))

    @asynccontextmanager
    async def pipe(self) -> AsyncGenerator["AsyncClusterPipe"]:
        """As `AsyncLink.pipe`, but nothing is sent ahead."""
        yield AsyncClusterPipe(self)

    async def close(self) -> None:
        """Close every connection."""
        for link in self._links.values():
            await link.close()

    async def _ask(self, ask: Ask) -> list[Reply]:
        patience = self._shards.patience()
        while True:
            try:
                return checked(ask, await self._try(ask), self._shards.settings.url)
            except AWAY + HOPELESS as error:
                await asyncio.sleep(self._shards.next_delay_s(patience, error, ask))

    async def _read(self, commands: Sequence[Command], wait_s: float) -> list[Reply]:
        until_s = time.monotonic() + wait_s
        ask = Ask(tuple(commands))
        while not _has_news(found := await self._ask(ask)) and time.monotonic() < until_s:  # noqa: ASYNC110  # no event
            await asyncio.sleep(LOOK_AGAIN_S)
        return _together(found)

    async def _try(self, ask: Ask) -> list[Reply]:
        trip = Trip(ask.commands)
        for _ in range(MAX_MOVES):
            parts = trip.parts(self._shards.table or await self._look())
            asked = [self._link(part.address).exchange(_of_part(ask, part)) for part in parts]
            for part, replies in zip(parts, await asyncio.gather(*asked), strict=True):
                trip.heard(part, replies)
            if trip.is_done:
                return trip.answer()
            self._shards.table = None
        raise _moves()

    async def _scan(self, command: Command, shard: int) -> tuple[Reply, int]:
        addresses = (self._shards.table or await self._look()).addresses
        [reply] = await self._link(addresses[shard]).ask(Ask((command,)))
        return reply, len(addresses)

    async def _look(self) -> SlotTable:
        problem: Exception | None = None
        for address in self._shards.candidates():
            try:
                [reply] = await self._link(address).exchange(Ask((LOOK,)))
                return self._shards.learn(reply, address)
            except AWAY as error:
                problem = error
        raise problem or _moves()

    def _link(self, address: Address) -> AsyncLink:
        if address not in self._links:
            self._links[address] = AsyncLink(self._shards.settings_of(address))
        return self._links[address]


class AsyncClusterPipe:
    """As `ClusterPipe`, for asyncio."""

    def __init__(self, link: AsyncClusterLink) -> None:
        self._link = link
        self._waiting: deque[Ask] = deque()

    @property
    def is_full(self) -> bool:
        """Whether a reply should be read before more is sent."""
        return bool(self._waiting)

    async def send(self, ask: Ask) -> None:
        """Remember what to send."""
        self._waiting.append(ask)

    async def receive(self) -> list[Reply]:
        """As `ClusterPipe.receive`."""
        return await self._link.ask(self._waiting.popleft())


# ---------------------------------------------------------------- SCAN, shard by shard


def _scanned(command: Command, scan: Callable[[Command, int], tuple[Reply, int]]) -> Reply:
    shard, own = _cursor(command)
    return _next(shard, *scan(own, shard))


async def _scanned_async(command: Command, scan: Callable[[Command, int], Awaitable[tuple[Reply, int]]]) -> Reply:
    shard, own = _cursor(command)
    return _next(shard, *await scan(own, shard))


def _cursor(command: Command) -> tuple[int, Command]:
    """The shard that a cursor of ours is about, and the command for it."""
    name, cursor, *rest = command
    shard, _, own = str(cursor, "ascii").rpartition(":") if isinstance(cursor, bytes) else ("", "", str(cursor))
    return int(shard or 0), (name, own, *rest)


def _next(shard: int, reply: Reply, num_shards: int) -> Reply:
    """The same reply, whose cursor goes on at the next shard when this one is done."""
    cursor, names = cast("tuple[bytes, list[bytes]]", reply)
    if cursor != b"0":
        return [b"%d:%s" % (shard, cursor), names]
    return [b"0" if shard + 1 == num_shards else b"%d:0" % (shard + 1), names]


def open_link(settings: LinkSettings) -> Link | ClusterLink:
    """The link that the URL asks for."""
    return ClusterLink(settings) if is_cluster(settings.url) else Link(settings)


def open_async_link(settings: LinkSettings) -> AsyncLink | AsyncClusterLink:
    """As `open_link`, for asyncio."""
    return AsyncClusterLink(settings) if is_cluster(settings.url) else AsyncLink(settings)
