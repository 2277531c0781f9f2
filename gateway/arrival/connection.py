"""A connection whose requests must arrive in time. uvicorn bounds only the time between two requests."""

import asyncio
import logging
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from sluice.gateway.arrival.addresses import Addresses
from sluice.gateway.connections.connection import MAX_HEADER_BYTES, TOO_LARGE
from sluice.gateway.errors import CALLER, HttpError
from sluice.gateway.log.answers import count_answer
from sluice.gateway.log.lines import log_event
from sluice.gateway.log.requests import REQUEST_ID, new_request_id
from sluice.gateway.refusals import count, refusal
from sluice.protocol.bounds import ADDRESS_CONNECTIONS, HEADER_BYTES, HEADERS

LEAST_BYTES_PER_S = 16 * 1024
"""Least rate of a request beyond the limit: so many bytes give a second, of which at most the limit is saved up."""

LINGER_S = 1.0
"""How long the rest of a body is read after its answer. A reset at once could lose the answer."""

SPARE_CONNECTIONS = 256
"""Connections beyond the limit that are told so with 503. Further ones are closed unread."""

TOO_SLOW = HttpError(408, CALLER, "the request took too long to arrive", "request_timeout")
MALFORMED = HttpError(400, CALLER, "the request is not valid HTTP/1.1", "malformed_request")

LOG = logging.getLogger(__name__)


class ArrivingConnection(H11Protocol):
    """uvicorn's connection. Changes as requests arrive."""

    arrival_limit_s = 30.0
    """Longest time from a connection, or the first byte of a request, to its last one, and longest pause in it."""

    addresses = Addresses(ADDRESS_CONNECTIONS.most, ())
    """Those of all connections."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # Any: as uvicorn has it
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._timer: asyncio.TimerHandle | None = None
        self._until_s = 0.0
        self._address = ""
        self._num_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] (as uvicorn's)
        """Begin to wait for a request, unless there are too many connections."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        is_too_much = self.addresses.add(self._address)
        if is_too_much:
            count(ADDRESS_CONNECTIONS)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency + SPARE_CONNECTIONS:
            is_too_much = True
        if is_too_much:
            transport.abort()
        else:
            self._begin_arrival()

    def data_received(self, data: bytes) -> None:
        """Count what arrives of a request."""
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._finish_arrival()
            return
        if self._timer is None:
            self._begin_arrival()
        self._num_bytes += len(data)
        most_s = self.loop.time() + self.arrival_limit_s
        self._until_s = min(most_s, self._until_s + len(data) / LEAST_BYTES_PER_S)

    def on_response_complete(self) -> None:
        """Read no further for long if the answer came before the end of its request."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(LINGER_S, self._drop_rest)
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._begin_arrival()  # a part of the next request came with the last one
            self._num_bytes = 1

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._finish_arrival()
        self.addresses.remove(self._address)
        super().connection_lost(exc)

    def _begin_arrival(self) -> None:
        self._until_s, self._num_bytes = self.loop.time() + self.arrival_limit_s, 0
        self._timer = self.loop.call_later(self.arrival_limit_s, self._check_arrival)

    def _finish_arrival(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_arrival(self) -> None:
        if self.flow.read_paused:  # the handler is slow, and not the client
            self._begin_arrival()
            return
        spare_s = self._until_s - self.loop.time()
        if spare_s > 0:
            self._timer = self.loop.call_later(spare_s, self._check_arrival)
        else:
            self._refuse()

    def _refuse(self) -> None:
        self._timer = None
        if self._num_bytes:
            self._answer(TOO_SLOW)
        self._drop()

    def send_400_response(self, msg: str) -> None:  # uvicorn's text; clients read an object
        """Answer what h11 cannot read, and close the connection."""
        error = sys.exc_info()[1]  # uvicorn calls this while it handles h11's error
        is_too_large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == TOO_LARGE
        self._answer(_too_large(str(error)) if is_too_large else MALFORMED)
        self.transport.close()

    def _answer(self, error: HttpError) -> None:
        """Answer a request that does not reach the application, unless its answer has begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        request_id, body = new_request_id(), bytes(error.response.body)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            (REQUEST_ID, request_id),
        ]
        start = h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase)
        for event in (start, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        count_answer(error.status)
        log_event(LOG, "request answered", {"request_id": request_id, "status": error.status, "code": error.code})

    def _drop_rest(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            self._drop()

    def _drop(self) -> None:
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def _too_large(why: str) -> HttpError:
    if why == HEADERS.name:
        return refusal(HEADERS, f"there are more than {HEADERS.most} lines of headers")
    return refusal(HEADER_BYTES, f"headers are larger than {MAX_HEADER_BYTES} bytes")
