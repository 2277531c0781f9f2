"""Graceful shutdown: a response that does not end in time ends with an error and never looks complete."""

import asyncio
import json
from collections.abc import Callable
from typing import cast

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.gateway.errors import SERVER, HttpError

DRAIN = "drain"
"""Field of a request's state: the `Drain` of its gateway."""

EVENTS = b"text/event-stream"
SHUTTING_DOWN = HttpError(
    503, SERVER, "the gateway is shutting down; try again", "shutting_down", headers={"retry-after": "1"}
)


class Drain:
    """The open responses of a gateway. Changes as requests start and end."""

    def __init__(self) -> None:
        self._open: set[_Answer] = set()
        self.has_begun = False

    def start(self) -> None:
        """Begin the shutdown: streams without an end of their own stop now."""
        self.has_begun = True

    def begin(self, answer: "_Answer") -> None:
        """Add an open response."""
        self._open.add(answer)

    def finish(self, answer: "_Answer") -> None:
        """Remove a response that has ended."""
        self._open.discard(answer)

    def end(self) -> None:
        """Interrupt all open responses."""
        for answer in self._open:
            answer.interrupt()


def is_draining(request: Request) -> bool:
    """Return whether the gateway of a request is shutting down."""
    return cast("Drain", request.state[DRAIN]).has_begun


class Draining:
    """Middleware that ends interrupted responses with an error."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app, self._drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})[DRAIN] = self._drain
        answer = _Answer(send)
        self._drain.begin(answer)
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if not answer.is_interrupted:
                raise
            await answer.fail(scope, receive)
        finally:
            self._drain.finish(answer)


class _Answer:
    """One response. Changes as it is sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._task = cast("asyncio.Task[None]", asyncio.current_task())  # the task of the request
        self._start: Message | None = None
        self._is_complete = False
        self.is_interrupted = False

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    def interrupt(self) -> None:
        """Cancel the request's task, unless the response is complete."""
        if not self._is_complete:
            self.is_interrupted = True
            self._task.cancel()

    async def fail(self, scope: Scope, receive: Receive) -> None:
        """Send an error: in place of the response, or as a stream's last event. Abort any other response."""
        self._task.uncancel()
        if self._start is None:
            await SHUTTING_DOWN.response(scope, receive, self._send)
        elif any(name.lower() == b"content-type" and EVENTS in value for name, value in self._start["headers"]):
            event = f"event: error\ndata: {json.dumps(SHUTTING_DOWN.body)}\n\n".encode()
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            cast("Callable[[], None]", scope["state"]["abort"])()
