"""A connection of a client: its requests must arrive in time, and it is aborted when its client does not read.

What waits for a slow client is bounded: nothing more is produced while something waits, and the kernel takes little.
uvicorn bounds only the time between two requests, and h11 only the size of headers, after it has taken them apart.
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
from h11._receivebuffer import ReceiveBuffer, blank_line_regex  # where headers are bounded before they are parsed
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
"""Least rate of a request beyond the limit: so many bytes give a second, of which at most the limit is saved up."""

LINGER_S = 1.0
"""How long the rest of a body is read after its answer. A reset at once could lose the answer."""

SPARE_CONNECTIONS = 256
"""Connections beyond the limit that are told so with 503. Further ones are closed unread."""

TOO_SLOW = HttpError(408, CALLER, "the request took too long to arrive", "request_timeout")
MALFORMED = HttpError(400, CALLER, "the request is not valid HTTP/1.1", "malformed_request")


LOOKS_PER_LIMIT = 4
"""How often a waiting connection is looked at: it is aborted at most this share of the limit late."""

UNSENT_BYTES = 64 * 1024
"""What the kernel takes beyond what the client has room for."""

MAX_HEADER_BYTES = HEADER_BYTES.most
FREE_CHUNKS, BYTES_PER_CHUNK = 256, 64
"""Chunks of a body that may be of any size; further ones must have this many bytes on average."""

TOO_LARGE = 431
NO_LINGER = struct.pack("ii", 1, 0)
LOG = logging.getLogger(__name__)


class HeaderBuffer(ReceiveBuffer):
    """h11's buffer. Refuses many or large headers before they are taken apart, which costs 10 us for each."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of headers or trailers, once all are there.

        Raises:
            RemoteProtocolError: there are too many, or they are too large.
        """
        data = self._data
        if len(data) > MAX_HEADER_BYTES or data.count(b"\n") > HEADERS.most:
            found = blank_line_regex.search(data)
            end = len(data) if found is None else found.end()
            if data.count(b"\n", 0, end) > HEADERS.most + 2:  # the first line and the blank one
                raise h11.RemoteProtocolError(HEADERS.name, error_status_hint=TOO_LARGE)
            if end > MAX_HEADER_BYTES:
                raise h11.RemoteProtocolError(HEADER_BYTES.name, error_status_hint=TOO_LARGE)
        return super().maybe_extract_lines()


class Protocol(h11.Connection):
    """h11's state machine, without a turn of it for each piece of a body, which changes no state.

    Changes with each event: it counts the chunks of a body.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._receive_buffer = HeaderBuffer()
        self._num_chunks = self._num_chunk_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return what arrived.

        Raises:
            RemoteProtocolError: it is not HTTP, or its chunks are small and many.
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
    """What a connection may take."""

    arrival_limit_s: float
    """Longest time from a connection, or the first byte of a request, to its last one, and longest pause in it."""

    read_limit_s: float
    """How long a client may read nothing of what waits for it."""

    addresses: Addresses
    """Those of all connections."""


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
        # Each request of this connection may end it so.
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
        """Bound what may wait in the process and in the kernel, and begin to wait for a request."""
        super().connection_made(transport)
        # What the kernel does not take counts as waiting. Not 0: asyncio's TLS would pause although nothing waits.
        transport.set_write_buffer_limits(high=1)
        sock = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if self._is_too_much():
            transport.abort()
        else:
            self._begin_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting and looking."""
        self._finish_arrival()
        self._limits.addresses.remove(self._address)
        self._stop_looking()
        super().connection_lost(exc)

    def abort(self) -> None:
        """End the connection with a reset, which no client takes for the end of an answer."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()

    def _is_too_much(self) -> bool:
        """Count the connection; return whether it is one too many."""
        self._address = self.client[0] if self.client else ""
        is_too_much = self._limits.addresses.add(self._address)
        if is_too_much:
            count(ADDRESS_CONNECTIONS)
        most = self.limit_concurrency
        return is_too_much or (most is not None and len(self.connections) > most + SPARE_CONNECTIONS)

    # ------------------------------------------------------------ requests that arrive

    def data_received(self, data: bytes) -> None:
        """Count what arrives of a request."""
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
        """Read no further for long if the answer came before the end of its request."""
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
        if self.flow.read_paused:  # the handler is slow, and not the client
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

    # ------------------------------------------------------------ answers that are read

    def pause_writing(self) -> None:
        """Begin to look at how the client reads."""
        super().pause_writing()
        self._num_waiting_bytes, self._num_looks = self.transport.get_write_buffer_size(), 0
        self._share = share_in(self.cycle.scope) if self.cycle else None
        if self._share is not None and self._share.wait_for_reader(self._num_waiting_bytes):
            count(TENANT_UNREAD_MIB)
            # Not at once: uvicorn is writing.
            self.loop.call_soon(self.abort)
        self._plan_look()

    def resume_writing(self) -> None:
        """Stop looking: the client has read."""
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
