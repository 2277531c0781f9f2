"""A client's connection: requests must arrive in time, and it is aborted if the client does not read its responses.

Unsent data of a slow client is bounded (backpressure): a response is not continued while data waits, and the kernel
buffers little. uvicorn bounds only the time between two requests; h11 only the size of headers, after parsing them.
"""

import asyncio
import logging
import socket
import struct
import sys
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer, blank_line_regex  # so that headers are bounded before they are parsed
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from sluice.gateway.arrival.addresses import Addresses
from sluice.gateway.arrival.shares import RequestShare, share_in
from sluice.gateway.errors import CALLER, HttpError
from sluice.gateway.log.lines import log_event
from sluice.gateway.log.requests import REQUEST_ID, count_answer, new_request_id
from sluice.gateway.refusals import count, refusal
from sluice.protocol.bounds import ADDRESS_CONNECTIONS, HEADER_BYTES, HEADERS, TENANT_UNREAD_MIB

LEAST_BYTES_PER_S = 16 * 1024
"""Least rate of a request that takes longer than the limit: this many bytes extend it by a second, up to the limit."""

LINGER_S = 1.0
"""How long the rest of a body is read after its response. An immediate reset could destroy the response."""

SPARE_CONNECTIONS = 256
"""Connections beyond the limit that get a 503. Further ones are closed unread."""

TOO_SLOW = HttpError(408, CALLER, "the request took too long to arrive", "request_timeout")
MALFORMED = HttpError(400, CALLER, "the request is not valid HTTP/1.1", "malformed_request")


LOOKS_PER_LIMIT = 4
"""Checks of a stalled connection per limit: it is aborted at most 1/4 of the limit late."""

UNSENT_BYTES = 64 * 1024
"""Most bytes that the kernel buffers beyond the client's receive window."""

MAX_HEADER_BYTES = HEADER_BYTES.most
FREE_CHUNKS, BYTES_PER_CHUNK = 256, 64
"""Number of chunks of a body that may have any size; further ones must have this many bytes on average."""

TOO_LARGE = 431
NO_LINGER = struct.pack("ii", 1, 0)
LOG = logging.getLogger(__name__)


class HeaderBuffer(ReceiveBuffer):
    """h11's buffer. Refuses too many or too large headers before they are parsed, which costs 10 us a header."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of headers or trailers once all have arrived.

        Raises:
            RemoteProtocolError: there are too many, or they are too large.
        """
        data = self._data
        if len(data) > MAX_HEADER_BYTES or data.count(b"\n") > HEADERS.most:
            blank_line = blank_line_regex.search(data)
            end = len(data) if blank_line is None else blank_line.end()
            if data.count(b"\n", 0, end) > HEADERS.most + 2:  # 2: the request line and the blank line
                raise h11.RemoteProtocolError(HEADERS.name, error_status_hint=TOO_LARGE)
            if end > MAX_HEADER_BYTES:
                raise h11.RemoteProtocolError(HEADER_BYTES.name, error_status_hint=TOO_LARGE)
        return super().maybe_extract_lines()


class Protocol(h11.Connection):
    """h11's state machine, which is skipped for each piece of a response's body: these do not change its state.

    Changes with each event; counts the chunks of a request's body.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._receive_buffer = HeaderBuffer()
        self._num_chunks = self._num_chunk_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event.

        Raises:
            RemoteProtocolError: the data is not HTTP, or it has too many small chunks.
        """
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_chunk_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_chunk_bytes // BYTES_PER_CHUNK:
                raise h11.RemoteProtocolError("the chunks are too small")
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_chunk_bytes = 0
        return event

    def send(self, event: h11.Event) -> bytes | None:  # pyright: ignore[reportIncompatibleMethodOverride] (h11 overloads)
        """Encode an event."""
        if type(event) is not h11.Data or self.our_state is not h11.SEND_BODY or self._writer is None:
            return super().send(event)
        pieces: list[bytes] = []
        try:
            self._writer(event, pieces.append)
        except h11.LocalProtocolError:
            self.send_failed()
            raise
        return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of a connection."""

    arrival_limit_s: float
    """Longest time from the connection, or a request's first byte, to the last byte, and longest pause in between."""

    read_limit_s: float
    """Longest time in which a client reads nothing although data waits for it."""

    addresses: Addresses
    """The number of open connections of each client address."""


class ClientConnection(H11Protocol):
    """uvicorn's connection. Changes as requests arrive, and as its client reads."""

    def __init__(
        self,
        limits: ConnectionLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # Any: as uvicorn has it
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        # Each request of this connection may abort it.
        super().__init__(config, server_state, {**app_state, "abort": self.abort}, _loop)
        self.conn = Protocol(MAX_HEADER_BYTES)
        self._limits = limits
        self._address = ""
        self._arrival: asyncio.TimerHandle | None = None
        self._until_s = 0.0
        self._num_bytes = 0
        self._look: asyncio.TimerHandle | None = None
        self._share: RequestShare | None = None
        self._num_waiting_bytes = self._num_looks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] (as uvicorn's)
        """Bound unsent data in the process and in the kernel, and start to wait for a request."""
        super().connection_made(transport)
        # Data that the kernel does not take counts as unsent. Not 0: asyncio's TLS would pause without unsent data.
        transport.set_write_buffer_limits(high=1)
        sock = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if self._is_too_much():
            transport.abort()
        else:
            self._begin_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers of the connection."""
        self._finish_arrival()
        self._limits.addresses.remove(self._address)
        self._stop_looking()
        super().connection_lost(exc)

    def abort(self) -> None:
        """End the connection with a reset, which no client mistakes for the end of a response."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()

    def _is_too_much(self) -> bool:
        """Count the connection; return whether there are too many."""
        self._address = self.client[0] if self.client else ""
        is_too_much = self._limits.addresses.add(self._address)
        if is_too_much:
            count(ADDRESS_CONNECTIONS)
        most = self.limit_concurrency
        return is_too_much or (most is not None and len(self.connections) > most + SPARE_CONNECTIONS)

    # ------------------------------------------------------------ arrival of requests

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request, and extend the time that the rest has."""
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._finish_arrival()
            return
        if self._arrival is None:
            self._begin_arrival()
        self._num_bytes += len(data)
        most_s = self.loop.time() + self._limits.arrival_limit_s
        self._until_s = min(most_s, self._until_s + len(data) / LEAST_BYTES_PER_S)

    def on_response_complete(self) -> None:
        """Limit how long the rest of the request is read, if the response ended before the request."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(LINGER_S, self._drop_rest)
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._begin_arrival()  # a part of the next request came with the last one
            self._num_bytes = 1

    def _begin_arrival(self) -> None:
        self._until_s, self._num_bytes = self.loop.time() + self._limits.arrival_limit_s, 0
        self._arrival = self.loop.call_later(self._limits.arrival_limit_s, self._check_arrival)

    def _finish_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _check_arrival(self) -> None:
        if self.flow.read_paused:  # the handler is slow, not the client
            self._begin_arrival()
            return
        spare_s = self._until_s - self.loop.time()
        if spare_s > 0:
            self._arrival = self.loop.call_later(spare_s, self._check_arrival)
        else:
            self._refuse()

    def _refuse(self) -> None:
        self._arrival = None
        if self._num_bytes:
            self._answer(TOO_SLOW)
        self._drop()

    def send_400_response(self, msg: str) -> None:  # `msg`: uvicorn's text; clients expect an object
        """Answer a request that h11 cannot parse, and close the connection."""
        error = sys.exc_info()[1]  # uvicorn calls this while it handles h11's error
        is_too_large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == TOO_LARGE
        self._answer(_too_large(str(error)) if is_too_large else MALFORMED)
        self.transport.close()

    def _answer(self, error: HttpError) -> None:
        """Answer a request that does not reach the application, unless its response has begun."""
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

    # ------------------------------------------------------------ delivery of responses

    def pause_writing(self) -> None:
        """Start to check whether the client reads."""
        super().pause_writing()
        self._num_waiting_bytes, self._num_looks = self.transport.get_write_buffer_size(), 0
        self._share = share_in(self.cycle.scope) if self.cycle else None
        if self._share is not None and self._share.wait_for_reader(self._num_waiting_bytes):
            count(TENANT_UNREAD_MIB)
            # Not immediately: uvicorn is in the middle of a write.
            self.loop.call_soon(self.abort)
        self._plan_look()

    def resume_writing(self) -> None:
        """Stop the checks: the client has read all data."""
        super().resume_writing()
        self._stop_looking()

    def _plan_look(self) -> None:
        self._look = self.loop.call_later(self._limits.read_limit_s / LOOKS_PER_LIMIT, self._check)

    def _check(self) -> None:
        num_waiting = self.transport.get_write_buffer_size()
        self._num_looks = self._num_looks + 1 if num_waiting >= self._num_waiting_bytes else 0
        self._num_waiting_bytes = num_waiting
        if self._share is not None:
            self._share.wait_for_reader(num_waiting)
        if self._num_looks >= LOOKS_PER_LIMIT:
            self.abort()
        else:
            self._plan_look()

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
        if self._share is not None:
            self._share.wait_for_reader(0)
            self._share = None


def _too_large(why: str) -> HttpError:
    if why == HEADERS.name:
        return refusal(HEADERS, f"there are more than {HEADERS.most} lines of headers")
    return refusal(HEADER_BYTES, f"headers are larger than {MAX_HEADER_BYTES} bytes")
