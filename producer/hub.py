"""Many readers of channels on one connection, for asyncio: what lets a web process follow thousands of jobs.

One read after the other covers the channels that somebody waits for. It blocks only briefly, so that a channel that is
asked for meanwhile joins the next one soon; with tokens arriving it returns sooner anyway.

A read costs server and client time for each channel in it, silent ones too, and most of thousands are silent: their
jobs wait in the queue. So a channel is in every read for its first second of silence; then it is looked at when it has
been silent for a twentieth longer, and at least once a second. A token that ends a silence comes at most a twentieth
of that silence late, and never more than a second.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from time import monotonic

from producer.commands import Ask, Entries, Reply, channel_entries, entry_number, xread

MIN_BLOCK_MS = 10
"""Longest time that a new reader waits for its first look, when few channels are read."""

CHANNELS_PER_MS = 5
MAX_BLOCK_MS = 250
"""A read costs the server time for each channel, so with many it blocks for longer."""

LIVELY_S = 1.0
"""A channel that was heard of within this time is in every read."""

SILENT_SHARE = 0.05
MAX_UNSEEN_S = 1.0

Send = Callable[[Ask], Awaitable[list[Reply]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A reader's wait."""

    channel: str
    after: str
    silent_since_s: float
    until_s: float
    future: "asyncio.Future[Entries]"


@dataclass(slots=True, eq=False)
class _Silences:
    """Since when channels have been silent, from one wait of a reader to its next. Changes with each."""

    _since_s: dict[str, float] = field(default_factory=dict[str, float])

    def since_s(self, channel: str) -> float:
        """When it was last heard of; now, if that is not known."""
        return self._since_s.pop(channel, monotonic())

    def keep(self, waiter: _Waiter, num_waiting: int) -> None:
        """Remember a wait that ended in silence. Readers that never ask again are forgotten in time."""
        self._since_s[waiter.channel] = waiter.silent_since_s
        if len(self._since_s) > 1000 + 2 * num_waiting:
            del self._since_s[next(iter(self._since_s))]


class Hub:
    """Shares reads between readers of one event loop.

    Args:
        send: Makes one round trip.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lively: list[_Waiter] = []
        self._silent: list[tuple[float, int, _Waiter]] = []
        """A heap by when each is due; the number tells equals apart."""
        self._filed = count()
        self._silences = _Silences()
        self._pump: asyncio.Task[None] | None = None

    async def read(self, channel: str, after: str, block_ms: int) -> Entries:
        """Entries of a channel after an entry id; empty after about `block_ms` without any.

        Raises:
            QueueUnreachable: the server stayed away.
        """
        future: asyncio.Future[Entries] = asyncio.get_running_loop().create_future()
        since_s = self._silences.since_s(channel)
        self._file(_Waiter(channel, after, since_s, monotonic() + block_ms / 1000, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await future

    async def close(self) -> None:
        """Stop reading; whoever still waits is cancelled."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        for waiter in self._all():
            waiter.future.cancel()

    def _all(self) -> list[_Waiter]:
        return [*self._lively, *(waiter for _, _, waiter in self._silent)]

    def _file(self, waiter: _Waiter) -> None:
        """Put a waiter where its silence belongs."""
        now_s = monotonic()
        silent_s = now_s - waiter.silent_since_s
        if silent_s < LIVELY_S:
            self._lively.append(waiter)
        else:
            due_s = now_s + min(MAX_UNSEEN_S, SILENT_SHARE * silent_s)
            heappush(self._silent, (due_s, next(self._filed), waiter))

    async def _run(self) -> None:
        while self._lively or self._silent:
            waiters = self._due()
            if not waiters:
                await asyncio.sleep(MIN_BLOCK_MS / 1000)
                continue
            try:
                [reply] = await self._send(self._ask(waiters))
            except Exception as error:  # noqa: BLE001 (whoever waits gets it, whatever it is)
                self._fail([*waiters, *self._all()], error)
                return
            except asyncio.CancelledError:
                self._lively += waiters
                raise
            self._settle(waiters, dict(channel_entries(reply)))

    def _due(self) -> list[_Waiter]:
        """Take out who is to be in the next read."""
        waiters, self._lively = self._lively, []
        now_s = monotonic()
        while self._silent and self._silent[0][0] <= now_s:
            waiters.append(heappop(self._silent)[2])
        return [waiter for waiter in waiters if not waiter.future.done()]

    def _ask(self, waiters: Sequence[_Waiter]) -> Ask:
        # Readers of one channel at several places share it from the first of them on.
        cursors: dict[str, str] = {}
        for waiter in waiters:
            before = cursors.get(waiter.channel)
            if before is None or entry_number(waiter.after) < entry_number(before):
                cursors[waiter.channel] = waiter.after
        block_ms = min(MAX_BLOCK_MS, MIN_BLOCK_MS + len(cursors) // CHANNELS_PER_MS)
        if self._silent:
            due_ms = round((self._silent[0][0] - monotonic()) * 1000)
            block_ms = max(1, min(block_ms, MIN_BLOCK_MS + due_ms))
        return Ask((xread(cursors, block_ms=block_ms),))

    def _settle(self, waiters: Sequence[_Waiter], found: dict[str, Entries]) -> None:
        now_s = monotonic()
        for waiter in waiters:
            entries = _after(found.get(waiter.channel, ()), waiter.after)
            if waiter.future.done():
                continue  # its reader has gone
            if entries:
                waiter.future.set_result(entries)
            elif waiter.until_s <= now_s:
                self._silences.keep(waiter, len(self._silent))
                waiter.future.set_result([])
            else:
                self._file(waiter)

    def _fail(self, waiters: Sequence[_Waiter], error: Exception) -> None:
        self._lively, self._silent = [], []
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)


def _after(entries: Sequence[tuple[str, bytes]], after: str) -> Entries:
    if not entries:
        return []
    first = entry_number(after)
    return [entry for entry in entries if entry_number(entry[0]) > first]
