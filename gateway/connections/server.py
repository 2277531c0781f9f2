"""uvicorn's server, with an end that no client takes for the end of its answer."""

import asyncio
import logging
import resource
import socket
from math import ceil

import uvicorn

from sluice.gateway.connections.connection import Connection
from sluice.gateway.connections.drain import Drain

ERROR_S = 2.0
"""How long errors may take to be sent after the drain."""

SPARE_FILES = 200
"""Open files beside those of clients: Redis, the database, stored files."""

LOG = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """A server whose open answers get `drain_s` to end after SIGTERM, then an error, then a reset."""

    def __init__(self, config: uvicorn.Config, drain: Drain, drain_s: float) -> None:
        super().__init__(config)
        self.config.timeout_graceful_shutdown = ceil(drain_s + ERROR_S)
        self._drain, self._drain_s = drain, drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and end what is open."""
        self._drain.start()
        ending = asyncio.get_running_loop().call_later(self._drain_s, self._drain.end)
        await super().shutdown(sockets)
        ending.cancel()
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.abort()  # pyright: ignore[reportUnknownMemberType] (the other classes of uvicorn have none)
        await asyncio.sleep(0)  # sockets are closed in the next turn of the loop


def allow_connections(num_connections: int) -> None:
    """Let the process open as many files as this many clients need; many systems start it with 1024."""
    wanted = num_connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < wanted:
            LOG.warning("Only %d open files are allowed, for up to %d clients: raise ulimit -n.", most, num_connections)
