"""Middleware that refuses requests which another program on the way may read differently, or that take too much."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.producer.contract.bounds import HELD_MIB, PARAMETERS
from sluice.producer.gateway.errors import HttpError, bad_request
from sluice.producer.gateway.refusals import refusal

HELD = "held_bytes"
"""Field of a request's state: what is held in memory of its body."""


class HeldBytes:
    """The bodies that are held in memory by all requests. Changes as they arrive, and as requests end."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes that are held from now on.

        Raises:
            HttpError: 503, too much is held.
        """
        if self._total + num_bytes > self._most:
            raise refusal(HELD_MIB, "too many large requests at a time")
        self._total += num_bytes

    def give(self, num_bytes: int) -> None:
        """Count bytes that are no longer held."""
        self._total -= num_bytes


class HeldByRequest:
    """What one request holds. Changes as its body arrives."""

    def __init__(self, of_all: HeldBytes) -> None:
        self._of_all = of_all
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count a piece of its body.

        Raises:
            HttpError: 503, all requests hold too much.
        """
        self._of_all.take(num_bytes)
        self._num_bytes += num_bytes

    def end(self) -> None:
        """Give all of it back."""
        self._of_all.give(self._num_bytes)
        self._num_bytes = 0


class Arrival:
    """Middleware that checks the headers of each request, and counts what is held of its body.

    Args:
        app: The application behind it.
        max_held_bytes: Most bytes of bodies that all requests may hold.
    """

    def __init__(self, app: ASGIApp, max_held_bytes: int) -> None:
        self._app, self._held = app, HeldBytes(max_held_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fault = _fault(scope)
        if fault is not None:
            await fault.response(scope, receive, send)
            return
        own = HeldByRequest(self._held)
        scope.setdefault("state", {})[HELD] = own
        try:
            await self._app(scope, receive, send)
        finally:
            own.end()


def _fault(scope: Scope) -> HttpError | None:
    """Return why a request is refused: after it, the connection is closed."""
    headers = Headers(scope=scope)
    message = code = ""
    status = 400
    if scope["query_string"].count(b"&") >= PARAMETERS.most:
        return refusal(PARAMETERS, f"the query has more than {PARAMETERS.most} parameters")
    if scope["http_version"] not in ("1.0", "1.1"):
        message, code, status = "the version of HTTP is not supported", "version_not_supported", 505
    elif "content-length" in headers and "transfer-encoding" in headers:
        # A proxy that goes by the length would take the rest of the body for another request.
        message, code = "give Content-Length or Transfer-Encoding, not both", "ambiguous_length"
    elif headers.get("content-encoding", "identity").lower() != "identity":
        message, code, status = "bodies must not be compressed", "encoding_not_supported", 415
    if not message:
        return None
    fault = bad_request(message, code=code, status=status)
    fault.headers["connection"] = "close"
    return fault
