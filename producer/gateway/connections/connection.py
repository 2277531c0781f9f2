"""A connection that is aborted when its client does not read.

What waits for a slow client is bounded: nothing more is produced while something waits, and the kernel takes little.
"""

import asyncio
import socket
import struct
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from sluice.producer.contract.bounds import HEADER_BYTES

LOOKS_PER_LIMIT = 4
"""How often a waiting connection is looked at: it is aborted at most this share of the limit late."""

UNSENT_BYTES = 64 * 1024
"""What the kernel takes beyond what the client has room for."""

MAX_HEADER_BYTES = HEADER_BYTES.most
NO_LINGER = struct.pack("ii", 1, 0)


class Protocol(h11.Connection):
    """h11's state machine, without a turn of it for each piece of a body, which changes no state."""

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
        self.conn = Protocol(h11.SERVER, config.h11_max_incomplete_event_size or MAX_HEADER_BYTES)
        self._look: asyncio.TimerHandle | None = None
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
        if self._num_looks >= LOOKS_PER_LIMIT:
            self.abort()
        else:
            self._plan_look()

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
