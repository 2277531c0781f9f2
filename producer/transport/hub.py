"""Shared reads of channels for many asyncio readers, so that a web process can follow thousands of jobs.

The hub sends one XREAD after the other, for all channels with a reader. For a reader that arrives while one blocks,
another read starts at once on another connection, so that its first token is not delayed; then it joins the next. First
entries are delivered first.

A read costs server and client time for each of its channels, and most of thousands are silent, because their jobs wait
in the queue. So a channel is in every read during its first second of silence; then it is read again after a twentieth
of its silence, and at least once a second. This is also the most by which a token that ends a silence is delayed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from time import monotonic
from typing import cast

from sluice.producer.operations.operation import Ask, Entries, Reply, channel_entries, xread
from sluice.protocol.calls.base import read_stream_id

MIN_BLOCK_MS = 30
"""Longest block of a read with few channels."""

NEW_BLOCK_MS = 50
"""Longest block of a read for new readers. Those without an entry by then join the next common read."""

MAX_NEW_READS = 16
"""Most concurrent reads for new readers. While this many block, further readers wait for one of them."""

PAUSE_S = 0.01
"""Shortest time between two reads of silent channels."""

CHANNELS_PER_MS = 5
MAX_BLOCK_MS = 250
"""Longest block of any read: with more channels a read blocks for longer, since each costs the server time."""

LIVELY_S = 1.0
"""A channel that had an entry within this time is in every read."""

SILENT_SHARE = 0.05
MAX_UNSEEN_S = 1.0

BEGIN = "0-0"
Send = Callable[[Ask], Awaitable[list[Reply]]]


@dataclass(slots=True, eq=False)
class _Waiter:
    """A reader's wait. Immutable, but not frozen, because one is created for each entry."""

    channel: str
    after: str
    silent_since_s: float
    until_s: float
    future: "asyncio.Future[Entries]"


@dataclass(slots=True, eq=False)
class _Silences:
    """The time of each channel's last entry, kept between two waits of its reader."""

    _since_s: dict[str, float] = field(default_factory=dict[str, float])

    def since_s(self, channel: str, now_s: float) -> float:
        """Return when a channel last had an entry, or now if unknown."""
        return self._since_s.pop(channel, now_s)

    def keep(self, waiter: _Waiter, num_waiting: int) -> None:
        """Keep the time of a wait without an entry. The oldest are removed, because their readers may never return."""
        self._since_s[waiter.channel] = waiter.silent_since_s
        if len(self._since_s) > 1000 + 2 * num_waiting:
            del self._since_s[next(iter(self._since_s))]


class Hub:
    """The reads that the readers of one event loop share.

    Args:
        send: Function for one round trip.
        in_turn: Opens a `Send` for consecutive round trips, which may keep its connection.
    """

    def __init__(self, send: Send, in_turn: Callable[[], AbstractAsyncContextManager[Send]]) -> None:
        self._send, self._in_turn = send, in_turn
        self._lively: list[_Waiter] = []
        self._silent: list[tuple[float, int, _Waiter]] = []
        """A heap by due time; the number breaks ties."""
        self._filed = count()
        self._silences = _Silences()
        self._new: list[_Waiter] = []
        self._new_reads: set[asyncio.Task[None]] = set()
        self._pump: asyncio.Task[None] | None = None
        self._is_reading = False

    async def read(self, channel: str, after: str, block_ms: int) -> Entries:
        """Return a channel's entries after an entry id; empty after about `block_ms` without any.

        Raises:
            QueueUnreachable: the server did not answer.
        """
        future: asyncio.Future[Entries] = asyncio.get_running_loop().create_future()
        now_s = monotonic()
        since_s = self._silences.since_s(channel, now_s)
        self._add(_Waiter(channel, after, since_s, now_s + block_ms / 1000, future), now_s)
        return await future

    async def close(self) -> None:
        """Stop reading, and cancel the waits."""
        running = [*self._new_reads, *([] if self._pump is None else [self._pump])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for waiter in [*self._new, *self._all()]:
            waiter.future.cancel()

    def _all(self) -> list[_Waiter]:
        return [*self._lively, *(waiter for _, _, waiter in self._silent)]

    def _add(self, waiter: _Waiter, now_s: float) -> None:
        if self._is_reading and now_s - waiter.silent_since_s < LIVELY_S:
            self._new.append(waiter)
            if len(self._new_reads) < MAX_NEW_READS:
                task = asyncio.create_task(self._read_new())
                task.add_done_callback(self._go_on)
                self._new_reads.add(task)
        else:
            self._file(waiter, now_s)
            self._wake()

    def _wake(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
            self._pump.add_done_callback(self._go_on)

    def _go_on(self, ended: asyncio.Task[None]) -> None:
        """Continue reading for the remaining waiters after a Ctrl-C ended a read."""
        if not ended.cancelled() and ended.exception() is not None and (self._lively or self._silent):
            self._wake()

    def _file(self, waiter: _Waiter, now_s: float) -> None:
        """Add a waiter to each read, or schedule it if its channel is silent."""
        silent_s = now_s - waiter.silent_since_s
        if silent_s < LIVELY_S:
            self._lively.append(waiter)
        else:
            due_s = now_s + min(MAX_UNSEEN_S, SILENT_SHARE * silent_s)
            heappush(self._silent, (due_s, next(self._filed), waiter))

    async def _run(self) -> None:
        while self._lively or self._silent:  # including waiters that arrived while the connection was released
            async with self._in_turn() as send:
                await self._read_all(send)

    async def _read_all(self, send: Send) -> None:
        while self._lively or self._silent:
            waiters = self._due()
            if not waiters:
                await asyncio.sleep(PAUSE_S)
                continue
            cursors = _cursors(waiters)
            self._is_reading = True
            try:
                [reply] = await send(Ask((xread(cursors, block_ms=self._block_ms(len(cursors))),)))
                self._settle(waiters, cursors, dict(channel_entries(reply)))
            except Exception as error:  # noqa: BLE001 (every waiter gets it)
                self._fail([*waiters, *self._take_all()], error)
                return
            except BaseException:  # a cancellation, or a Ctrl-C that was meant for another call
                self._lively += waiters
                raise
            finally:
                self._is_reading = False
            # Readers that got an entry ask for the next one before the next read, so that it includes them.
            await asyncio.sleep(0)

    async def _read_new(self) -> None:
        """Read for readers that arrived during a read, until none has arrived during this one."""
        try:
            while waiters := self._take_new():
                await self._read_for(waiters)
                self._wake()
        finally:
            # Before any reader runs, so that one that asks again does not rely on this read.
            self._new_reads.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _read_for(self, waiters: list[_Waiter]) -> None:
        cursors = _cursors(waiters)
        try:
            [reply] = await self._send(Ask((xread(cursors, block_ms=NEW_BLOCK_MS),)))
            self._settle(waiters, cursors, dict(channel_entries(reply)))
        except Exception as error:  # noqa: BLE001 (every waiter gets it)
            # Including those that arrived meanwhile, for which no other read may start.
            self._fail([*waiters, *self._take_new()], error)
        except BaseException:  # as in _read_all
            self._lively += waiters
            raise

    def _take_new(self) -> list[_Waiter]:
        waiters, self._new = [waiter for waiter in self._new if not waiter.future.done()], []
        return waiters

    def _due(self) -> list[_Waiter]:
        """Remove and return the waiters of the next read."""
        waiters, self._lively = self._lively, []
        now_s = monotonic()
        while self._silent and self._silent[0][0] <= now_s:
            waiters.append(heappop(self._silent)[2])
        return [waiter for waiter in waiters if not waiter.future.done()]

    def _block_ms(self, num_channels: int) -> int:
        block_ms = min(MAX_BLOCK_MS, MIN_BLOCK_MS + num_channels // CHANNELS_PER_MS)
        if self._silent:
            due_ms = round((self._silent[0][0] - monotonic()) * 1000)
            block_ms = max(1, min(block_ms, round(1000 * PAUSE_S) + due_ms))
        return block_ms

    def _settle(self, waiters: list[_Waiter], cursors: Mapping[str, str], by_channel: Mapping[str, Entries]) -> None:
        now_s = monotonic()
        waiters.sort(key=_is_underway)
        for waiter in waiters:
            entries = by_channel.get(waiter.channel, [])
            if entries and waiter.after != cursors[waiter.channel]:
                entries = _after(entries, waiter.after)
            if waiter.future.done():
                continue  # its reader was cancelled
            if entries:
                waiter.future.set_result(entries)
            elif waiter.until_s <= now_s:
                self._silences.keep(waiter, len(self._silent))
                waiter.future.set_result([])
            else:
                self._file(waiter, now_s)

    def _take_all(self) -> list[_Waiter]:
        waiters = self._all()
        self._lively, self._silent = [], []
        return waiters

    def _fail(self, waiters: Sequence[_Waiter], error: Exception) -> None:
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)


def _cursors(waiters: Sequence[_Waiter]) -> dict[str, str]:
    """Return the entry id to read each channel from: the first of its readers' positions."""
    cursors: dict[str, str] = {}
    for waiter in waiters:
        before = cursors.setdefault(waiter.channel, waiter.after)
        if before != waiter.after and read_stream_id(waiter.after) < read_stream_id(before):
            cursors[waiter.channel] = waiter.after
    return cursors


def _is_underway(waiter: _Waiter) -> bool:
    return waiter.after != BEGIN


def _after(entries: Sequence[tuple[str, bytes]], after: str) -> Entries:
    first = read_stream_id(after)
    return [entry for entry in entries if read_stream_id(entry[0]) > first]
