"""Responses that stream server-sent events."""

import asyncio
from collections.abc import AsyncIterable, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from sluice.gateway.openapi.routes import EVENTS

PASSED_ON = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""Headers that keep proxies from storing events, and from buffering some kilobytes of them, as nginx does."""

SILENCE_S = 15.0
"""Time without an event after which a comment is sent: many proxies close connections that are silent for 60 s."""

COMMENT = b": waiting\n\n"


class EventStream(StreamingResponse):
    """A response whose events reach the client one by one, also through a proxy.

    Args:
        events: The encoded events.
        headers: Further headers.
    """

    def __init__(self, events: AsyncIterable[bytes], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(events, headers={**PASSED_ON, **(headers or {})}, media_type=EVENTS)

    async def stream_response(self, send: Send) -> None:
        """Send the events, and after each silence a comment, which clients ignore."""
        clock = asyncio.get_running_loop().time
        sent_s = clock()

        async def send_now(message: Message) -> None:
            nonlocal sent_s
            sent_s = clock()
            if not message.get("more_body", True):
                commenting.cancel()
            await send(message)

        async def comment() -> None:
            while True:
                await asyncio.sleep(sent_s + SILENCE_S - clock())
                if clock() - sent_s >= SILENCE_S:
                    await send_now({"type": "http.response.body", "body": COMMENT, "more_body": True})

        commenting = asyncio.create_task(comment())
        try:
            await super().stream_response(send_now)
        finally:
            commenting.cancel()
            # A connection error ends the events as well.
            await asyncio.gather(commenting, return_exceptions=True)
