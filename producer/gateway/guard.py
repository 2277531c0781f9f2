"""Refuse requests that a web page made: without keys, any page that the user opens could read the queue.

A page reaches a loopback server through its own host name (DNS rebinding), or from a foreign origin.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.producer.gateway.errors import HttpError, bad_request
from sluice.producer.gateway.settings import is_loopback


class LoopbackGuard:
    """Middleware that accepts requests whose Host, and Origin if there is one, are loopback names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        refusal = _refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal.response(scope, receive, send)


def _refusal(headers: Headers) -> HttpError | None:
    host, origin = headers.get("host", ""), headers.get("origin")
    if not is_loopback(_host_of(f"//{host}")):
        return bad_request(f"Host must be a loopback name, got {host!r}", code="host_refused", status=421)
    if origin is not None and not is_loopback(_host_of(origin)):
        return bad_request(f"requests from {origin!r} are refused", code="origin_refused", status=403)
    return None


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
