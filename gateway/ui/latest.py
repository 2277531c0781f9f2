"""A cached reading that all open pages share, so that its cost does not grow with their number."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Latest(Generic[Value]):
    """A cached value that all open pages share, read at most every `every_s`. Changes with each read."""

    def __init__(self, read: Callable[[], Awaitable[Value]], every_s: float) -> None:
        self._read, self._every_s = read, every_s
        self._reading: asyncio.Task[Value] | None = None
        self._read_s = float("-inf")

    async def get(self) -> Value:
        """Return the value; read it again if it is too old."""
        is_old = monotonic() - self._read_s >= self._every_s
        if self._reading is None or (self._reading.done() and (is_old or self._reading.exception() is not None)):
            self._read_s = monotonic()
            self._reading = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._reading)

    def forget(self) -> None:
        """Read the value again next time, because something changed."""
        self._reading = None
