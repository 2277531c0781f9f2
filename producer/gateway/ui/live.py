"""Live streams of pages: server-sent events, until the reader leaves, is signed in no more, or the gateway stops."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from time import monotonic
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse

from sluice.producer.errors import ProducerError
from sluice.producer.gateway.connections.drain import is_draining
from sluice.producer.gateway.errors import HttpError
from sluice.producer.gateway.ui.frame import EVENTS, HEADERS, Frame
from sluice.producer.gateway.ui.visitors import Visitor

BEAT_S = 0.5
"""How often a stream looks whether it may go on."""

Found = TypeVar("Found")
Parts = Mapping[str, str]
"""HTML by the id of the element that shows it."""


class Latest(Generic[Found]):
    """A value that all open pages share: it is read at most so often. Changes with each read."""

    def __init__(self, read: Callable[[], Awaitable[Found]], every_s: float) -> None:
        self._read, self._every_s = read, every_s
        self._reading: asyncio.Task[Found] | None = None
        self._read_s = float("-inf")

    async def get(self) -> Found:
        """Return the value, read again if it is old."""
        is_old = monotonic() - self._read_s >= self._every_s
        if self._reading is None or (self._reading.done() and (is_old or self._reading.exception() is not None)):
            self._read_s = monotonic()
            self._reading = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._reading)


class Live:
    """Where live streams come from."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def stream(self, events: AsyncIterator[bytes]) -> StreamingResponse:
        """Answer with events."""
        return StreamingResponse(events, headers={**HEADERS, "x-accel-buffering": "no"}, media_type=EVENTS)

    def may_go_on(self, request: Request, visitor: Visitor) -> bool:
        """Return whether a stream goes on: the key is active, and the gateway does not stop."""
        try:
            return self._frame.is_still_in(visitor) and not is_draining(request)
        except HttpError:  # keys have been unreadable for too long
            return False

    async def parts(
        self, request: Request, visitor: Visitor, read: Callable[[], Awaitable[Parts]], every_s: float
    ) -> AsyncIterator[bytes]:
        """Yield what has changed of a page, again and again."""
        shown: dict[str, str] = {}
        while True:
            try:
                now = await read()
                changed = {name: html for name, html in now.items() if shown.get(name) != html}
                shown.update(changed)
                yield event("parts", changed)
            except (ProducerError, HttpError):
                yield event("lost", {})
            if not await self.wait(request, visitor, every_s):
                yield event("over", {})
                return

    async def wait(self, request: Request, visitor: Visitor, wait_s: float) -> bool:
        """Wait, and return whether the stream goes on."""
        until_s = monotonic() + wait_s
        while (left_s := until_s - monotonic()) > 0:
            if not self.may_go_on(request, visitor):
                return False
            await asyncio.sleep(min(BEAT_S, left_s))
        return self.may_go_on(request, visitor) and await self._frame.has_session(visitor)


def event(kind: str, data: object, position: str | None = None) -> bytes:
    """Encode one event, in ASCII: some readers take U+2028 for the end of a line."""
    place = "" if position is None else f"id: {position}\n"
    return f"event: {kind}\n{place}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")
