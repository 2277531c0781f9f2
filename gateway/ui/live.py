"""Live streams of pages: server-sent events until the reader leaves or is signed out, or the gateway stops."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from time import monotonic

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sluice.gateway.connections.drain import is_draining
from sluice.gateway.errors import LIMIT, HttpError
from sluice.gateway.ui.frame import EVENTS, HEADERS, Frame
from sluice.gateway.ui.visitors import Visitor
from sluice.producer.errors import ProducerError

BEAT_S = 0.5
"""Time between two checks whether a stream may continue, in seconds."""

MAX_STREAMS = 30
"""Most open streams of one API key at a gateway: each costs a few commands a second."""

RETRY_S = 10
Parts = Mapping[str, str]
"""HTML by the id of its element."""

Handler = Callable[[Request, Visitor], Awaitable[AsyncIterator[bytes]]]


class LiveResponse(StreamingResponse):
    """A stream that counts as open while it is sent. The response to HEAD has only its headers."""

    def __init__(self, events: AsyncIterator[bytes], open_streams: Counter[str], name: str) -> None:
        super().__init__(events, headers={**HEADERS, "x-accel-buffering": "no"}, media_type=EVENTS)
        self._open, self._name = open_streams, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        if scope["method"] == "HEAD":
            await Response(headers=dict(self.headers))(scope, receive, send)
            return
        self._open[self._name] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._open[self._name] -= 1


class Live:
    """The live streams. Changes: it counts the open ones."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._open: Counter[str] = Counter()

    def route(self, path: str, handler: Handler) -> Route:
        """Return the route of a stream; the handler returns its events. A key with too many open streams gets a 429."""

        async def answer(request: Request, visitor: Visitor) -> Response:
            name = "" if visitor.caller.key is None else visitor.caller.key.id
            if self._open[name] >= MAX_STREAMS:
                message = f"{MAX_STREAMS} pages of this API key are live already; close one"
                raise HttpError(429, LIMIT, message, "too_many_streams", headers={"retry-after": str(RETRY_S)})
            return LiveResponse(await handler(request, visitor), self._open, name)

        return self._frame.page(path, answer)

    def may_go_on(self, request: Request, visitor: Visitor) -> bool:
        """Return whether a stream may continue: the key is active, and the gateway is not stopping."""
        try:
            return self._frame.is_still_in(visitor) and not is_draining(request)
        except HttpError:  # keys have been unreadable for too long
            return False

    async def parts(
        self, request: Request, visitor: Visitor, read: Callable[[], Awaitable[Parts]], every_s: float
    ) -> AsyncIterator[bytes]:
        """Yield the changed parts of a page, repeatedly."""
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

    async def wait(self, request: Request, visitor: Visitor, wait_s: float, woken: asyncio.Event | None = None) -> bool:
        """Wait for `wait_s` or until the event `woken` is set; clear it. Return whether the stream may continue."""
        until_s, woken = monotonic() + wait_s, woken or asyncio.Event()
        while not woken.is_set() and (left_s := until_s - monotonic()) > 0:
            if not self.may_go_on(request, visitor):
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(min(BEAT_S, left_s)):
                    await woken.wait()
        woken.clear()
        return self.may_go_on(request, visitor) and await self._frame.has_session(visitor)


def event(kind: str, data: object, position: str | None = None) -> bytes:
    """Encode one event, in ASCII, because some readers treat U+2028 as a line end."""
    place = "" if position is None else f"id: {position}\n"
    return f"event: {kind}\n{place}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")
