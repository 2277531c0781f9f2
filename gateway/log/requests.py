"""Give each request an id, log its end, and count it for the metrics of this gateway process."""

import logging
import re
from collections import Counter
from time import monotonic
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.gateway.log.lines import log_event

REQUEST_ID = "x-request-id"
SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""Valid request ids of clients; others are replaced."""

PROBES = ("/livez", "/readyz")
"""Paths that are logged only if they fail."""

FACTS = ("tenant", "key_id", "job_id")
"""Fields of a request's state that its log line has, if a handler set them."""

ANSWERED: Counter[str] = Counter()
"""Number of answered requests by status, as text; `none`: the client left before the response began."""

LOG = logging.getLogger(__name__)


def count_answer(status: int | None) -> None:
    """Count an answered request."""
    ANSWERED["none" if status is None else str(int(status))] += 1


def new_request_id() -> str:
    """Return an id for a request that has none."""
    return f"req_{uuid4().hex}"


class RequestLog:
    """Middleware that gives each request an id, in its response and in its log line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log its end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(REQUEST_ID, "")
        request = LoggedRequest(scope, request_id if SANE_ID.fullmatch(request_id) else new_request_id(), send)
        try:
            await self._app(scope, receive, request.send)
        finally:
            request.log()


class LoggedRequest:
    """One request. Changes as its response is sent."""

    def __init__(self, scope: Scope, request_id: str, send: Send) -> None:
        self._scope, self._id, self._send = scope, request_id, send
        self._state: dict[str, object] = scope.setdefault("state", {})
        self._began_s = monotonic()
        self._status: int | None = None
        self._is_complete = False

    async def send(self, message: Message) -> None:
        """Send a part of the response; its headers get the request's id."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self._id
        await self._send(message)
        self._is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    def log(self) -> None:
        """Count the request and log its end; successful probes are not logged."""
        count_answer(self._status)
        path: str = self._scope["path"]
        if path in PROBES and self._status == 200:
            return
        facts = {
            "request_id": self._id,
            "method": self._scope["method"],
            "path": path,
            "status": self._status,
            "is_complete": self._is_complete,
            "duration_ms": round(1000 * (monotonic() - self._began_s)),
        }
        log_event(LOG, "request answered", facts | {name: self._state[name] for name in FACTS if name in self._state})
