"""The resources of an asyncio client for each event loop, because a connection belongs to the loop that opened it.

One client may be used in consecutive loops (`asyncio.run`, Django's `async_to_sync`) and concurrently (a thread each).
A loop closes its resources when it shuts down; those that a loop left behind are dropped when the next loop starts.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """A resource of a loop, which only that loop may close."""

    async def close(self) -> None: ...


Held = TypeVar("Held", bound=Closable)

_OF_PARENTS: list[object] = []
"""Resources of the parent process after a fork. They are kept alive, because closing them would remove their sockets
from the parent's selector, which both processes share."""


class ByLoop(Generic[Held]):
    """One object for each event loop, created at its first use. Thread-safe.

    Args:
        make: Creates the object, in its loop.
    """

    def __init__(self, make: Callable[[], Held]) -> None:
        self._make = make
        self._entries: dict[asyncio.AbstractEventLoop, _Entry[Held]] = {}
        self._pid = os.getpid()

    def here(self) -> Held:
        """Return the object of the running loop."""
        if os.getpid() != self._pid:
            _OF_PARENTS.append(self._entries)
            self._entries, self._pid = {}, os.getpid()
        loop = asyncio.get_running_loop()
        entry = self._entries.get(loop)
        if entry is None:
            self._sweep()
            entry = self._entries[loop] = _Entry(self._make(), lambda: self._entries.pop(loop, None))
        return entry.held

    async def close(self) -> None:
        """Close this loop's object, and let other running loops close theirs."""
        entries, here = list(self._entries.items()), asyncio.get_running_loop()
        for loop, entry in entries:
            if loop is not here:
                del self._entries[loop]
                _let_close(loop, entry)
        if here in self._entries:
            await self._entries[here].close()

    def _sweep(self) -> None:
        """Drop the objects of ended loops; a loop that shut down has closed its own."""
        for loop, entry in list(self._entries.items()):
            if loop.is_closed() or not (loop.is_running() or entry.thread.is_alive()):
                self._entries.pop(loop, None)


class _Entry(Generic[Held]):
    """The object of one loop. It is closed by `close`, or when the loop shuts down its asynchronous generators."""

    def __init__(self, held: Held, forget: Callable[[], object]) -> None:
        self.held = held
        self.thread = threading.current_thread()
        self._forget = forget
        self._closing = self._close_at_shutdown()
        with suppress(StopIteration):
            # Started, so that the loop tracks it. It yields at once.
            self._closing.__anext__().send(None)

    async def close(self) -> None:
        """Close the object, once."""
        await self._closing.aclose()

    async def _close_at_shutdown(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            self._forget()
            await self.held.close()


def _let_close(loop: asyncio.AbstractEventLoop, entry: _Entry[Held]) -> None:
    """Close the object of a loop on that loop, if the loop runs."""
    if not loop.is_running():
        return  # dropped; the garbage collector closes its sockets
    try:
        asyncio.run_coroutine_threadsafe(entry.close(), loop)
    except RuntimeError:
        return  # the loop has just closed it
