"""Middleware that refuses ambiguous requests, which a proxy may parse differently, and those that exceed a bound."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.gateway.arrival.shares import HELD, RequestShare, Shares
from sluice.gateway.errors import HttpError, bad_request
from sluice.gateway.refusals import refusal
from sluice.protocol.bounds import PARAMETERS

TEXT = (b"application/json", b"text/html")
"""Media types whose size counts towards the cost of a read; others are files or event streams."""

CALLERS_FAULT, OUR_FAULT = 400, 500


class RequestBounds:
    """Middleware that checks the headers of each request, and counts the memory that its body uses.

    Args:
        app: The application behind it.
        shares: The memory that all requests use.
    """

    def __init__(self, app: ASGIApp, shares: Shares) -> None:
        self._app, self._shares = app, shares

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fault = _fault(scope)
        if fault is not None:
            await fault.response(scope, receive, send)
            return
        own = RequestShare(self._shares)
        scope.setdefault("state", {})[HELD] = own

        answer = _Answer(scope, send, own)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            answer.charge()
            own.end()


class _Answer:
    """A response that is being sent. Changes with each part."""

    def __init__(self, scope: Scope, send: Send, share: RequestShare) -> None:
        self._is_read = scope["method"] != "POST"
        self._send, self._share = send, share
        self._status, self._num_bytes, self._is_text = 0, 0, False

    async def send(self, message: Message) -> None:
        """Send a part."""
        if message["type"] == "http.response.start":
            self._share.give_back()  # the request's body is no longer needed
            self._status = message["status"]
            self._is_text = any(
                name == b"content-type" and value.startswith(TEXT) for name, value in message["headers"]
            )
        elif self._is_text:
            self._num_bytes += len(message.get("body", b""))
        await self._send(message)

    def charge(self) -> None:
        """Count the request as a read if it is one or was refused: no limit of the queue counts these."""
        is_refused = CALLERS_FAULT <= self._status < OUR_FAULT
        if is_refused or self._is_read:
            self._share.charge(self._num_bytes)


def _fault(scope: Scope) -> HttpError | None:
    """Return the error of a request that must be refused, or None. The connection is closed after it."""
    headers = Headers(scope=scope)
    message = code = ""
    status = 400
    if scope["query_string"].count(b"&") >= PARAMETERS.most:
        return refusal(PARAMETERS, f"the query has more than {PARAMETERS.most} parameters")
    if scope["http_version"] not in ("1.0", "1.1"):
        message, code, status = "the version of HTTP is not supported", "version_not_supported", 505
    elif "content-length" in headers and "transfer-encoding" in headers:
        # A proxy that trusts the length would take the rest of the body for another request (request smuggling).
        message, code = "give Content-Length or Transfer-Encoding, not both", "ambiguous_length"
    elif headers.get("content-encoding", "identity").lower() != "identity":
        message, code, status = "bodies must not be compressed", "encoding_not_supported", 415
    if not message:
        return None
    fault = bad_request(message, code=code, status=status)
    fault.headers["connection"] = "close"
    return fault
