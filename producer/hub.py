"""Many readers of channels on one connection, for asyncio: what lets a web process follow thousands of jobs.

One read after the other covers every channel that somebody waits for. It blocks only briefly, so that a channel that is
asked for meanwhile joins the next one soon; with tokens arriving it returns sooner anyway.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from producer.commands import Ask, Entries, Reply, channel_entries, entry_number, xread

MIN_BLOCK_MS = 10
"""Longest time that a new reader waits for its first look, when few channels are read."""

CHANNELS_PER_MS = 5
MAX_BLOCK_MS = 250
"""A read costs the server time for each channel, so with many it blocks for longer."""

Send = Callable[[Ask], Awaitable[list[Reply]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    channel: str
    after: str
    until_s: float
    future: "asyncio.Future[Entries]"


class Hub:
    """Shares reads between readers of one event loop.

    Args:
        send: Makes one round trip.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiters: list[_Waiter] = []
        self._pump: asyncio.Task[None] | None = None

    async def read(self, channel: str, after: str, block_ms: int) -> Entries:
        """Entries of a channel after an entry id; empty after about `block_ms` without any.

        Raises:
            QueueUnreachable: the server stayed away.
        """
        future: asyncio.Future[Entries] = asyncio.get_running_loop().create_future()
        self._waiters.append(_Waiter(channel, after, monotonic() + block_ms / 1000, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await future

    async def close(self) -> None:
        """Stop reading; whoever still waits is cancelled."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        for waiter in self._waiters:
            waiter.future.cancel()

    async def _run(self) -> None:
        while self._waiters:
            try:
                [reply] = await self._send(self._ask())
            except Exception as error:  # noqa: BLE001 (whoever waits gets it, whatever it is)
                self._fail(error)
                return
            self._settle(dict(channel_entries(reply)))

    def _ask(self) -> Ask:
        # Readers of one channel at several places share it from the first of them on.
        cursors: dict[str, str] = {}
        for waiter in self._waiters:
            before = cursors.get(waiter.channel)
            if before is None or entry_number(waiter.after) < entry_number(before):
                cursors[waiter.channel] = waiter.after
        block_ms = min(MAX_BLOCK_MS, MIN_BLOCK_MS + len(cursors) // CHANNELS_PER_MS)
        return Ask((xread(cursors, block_ms=block_ms),))

    def _settle(self, found: dict[str, Entries]) -> None:
        now_s = monotonic()
        waiting: list[_Waiter] = []
        for waiter in self._waiters:
            entries = _after(found.get(waiter.channel, ()), waiter.after)
            if waiter.future.done():
                continue  # its reader has gone
            if entries or waiter.until_s <= now_s:
                waiter.future.set_result(entries)
            else:
                waiting.append(waiter)
        self._waiters = waiting

    def _fail(self, error: Exception) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)


def _after(entries: Sequence[tuple[str, bytes]], after: str) -> Entries:
    if not entries:
        return []
    first = entry_number(after)
    return [entry for entry in entries if entry_number(entry[0]) > first]
