"""Responses that stream server-sent events."""

from collections.abc import AsyncIterable, Mapping

from starlette.responses import StreamingResponse

from sluice.producer.gateway.openapi.routes import EVENTS

PASSED_ON = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""What keeps proxies from storing events, and from collecting them until there are some kilobytes, as nginx does."""


class EventStream(StreamingResponse):
    """A response whose events reach the client one by one, also through a proxy.

    Args:
        events: The encoded events.
        headers: Further headers.
    """

    def __init__(self, events: AsyncIterable[bytes], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(events, headers={**PASSED_ON, **(headers or {})}, media_type=EVENTS)
