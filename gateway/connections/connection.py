"""A connection that is aborted when its client does not read.

What waits for a slow client is bounded: nothing more is produced while something waits, and the kernel takes little.
"""

import asyncio
import socket
import struct
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer, blank_line_regex  # where headers are bounded before they are parsed
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from sluice.gateway.arrival.shares import RequestShare, share_in
from sluice.gateway.refusals import count
from sluice.protocol.bounds import HEADER_BYTES, HEADERS, TENANT_UNREAD_MIB

LOOKS_PER_LIMIT = 4
"""How often a waiting connection is looked at: it is aborted at most this share of the limit late."""

UNSENT_BYTES = 64 * 1024
"""What the kernel takes beyond what the client has room for."""

MAX_HEADER_BYTES = HEADER_BYTES.most
FREE_CHUNKS, BYTES_PER_CHUNK = 256, 64
"""Chunks of a body that may be of any size; further ones must have this many bytes on average."""

TOO_LARGE = 431
NO_LINGER = struct.pack("ii", 1, 0)


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


class Connection(H11Protocol):
    """uvicorn's connection. Changes as its client reads."""

    read_limit_s = 60.0
    """How long a client may read nothing of what waits for it."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # Any: as uvicorn has it
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        # Each request of this connection may end it so.
        super().__init__(config, server_state, {**app_state, "abort": self.abort}, _loop)
        self.conn = Protocol(MAX_HEADER_BYTES)
        self._look: asyncio.TimerHandle | None = None
        self._share: RequestShare | None = None
        self._num_waiting_bytes = self._num_looks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] (as uvicorn's)
        """Bound what may wait in the process and in the kernel."""
        super().connection_made(transport)
        # What the kernel does not take counts as waiting. Not 0: asyncio's TLS would pause although nothing waits.
        transport.set_write_buffer_limits(high=1)
        sock = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

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

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop looking."""
        self._stop_looking()
        super().connection_lost(exc)

    def abort(self) -> None:
        """End the connection with a reset, which no client takes for the end of an answer."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()

    def _plan_look(self) -> None:
        self._look = self.loop.call_later(self.read_limit_s / LOOKS_PER_LIMIT, self._check)

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
