"""Run the gateway in a process of its own."""

import signal
import socket
from collections.abc import Callable

import uvicorn

from sluice.producer.errors import InvalidSetting
from sluice.producer.gateway.app import create_app
from sluice.producer.gateway.settings import GatewaySettings

KEEP_ALIVE_S = 75
MAX_HEADER_BYTES = 32 * 1024
BACKLOG = 2048


def serve(settings: GatewaySettings, report: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then let open streams end for up to `drain_s`.

    `report` is called with the base URL once the port is open.

    Raises:
        InvalidSetting: the Redis URL is wrong, or the address cannot be used.
    """
    server = uvicorn.Server(_config(settings))
    with _listening(settings) as listening:
        # Also before uvicorn installs its handlers, and when it raises the signal again after it has stopped.
        signal.signal(signal.SIGTERM, server.handle_exit)
        host, port = listening.getsockname()[:2]
        report(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
        server.run(sockets=[listening])


def _config(settings: GatewaySettings) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(settings),
        http="h11",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(settings.drain_s),
        log_config=None,
        server_header=False,
    )


def _listening(settings: GatewaySettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidSetting(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from error
