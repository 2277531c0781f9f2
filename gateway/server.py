"""Run the gateway in a process of its own."""

import asyncio
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from math import ceil
from typing import cast

import uvicorn

from sluice.gateway.app import create_app
from sluice.gateway.arrival.addresses import Addresses
from sluice.gateway.connections.connection import ClientConnection, ConnectionLimits
from sluice.gateway.connections.drain import Drain
from sluice.gateway.keyring import Keyring
from sluice.gateway.log.lines import configure_log, log_event
from sluice.gateway.settings import GatewaySettings, is_loopback
from sluice.producer.errors import InvalidSetting
from sluice.protocol.host.thread_errors import ended_by_thread_errors

LOG = logging.getLogger(__name__)
KEEP_ALIVE_S = 75
BACKLOG = 2048
ERROR_S = 2.0
"""How long errors may take to be sent after the drain, in seconds."""

SPARE_FILES = 200
"""Open files besides those of clients: Redis, the database, stored files."""

SWITCH_S = 0.001
"""Interpreter switch interval: how long a thread that encodes a large response delays the event loop at a time."""

MAX_DIGITS = 640
"""Most digits of an integer in JSON, the least that Python allows. Thousands with its default, 4300 digits, block the
event loop for 100 ms."""


class DrainingServer(uvicorn.Server):
    """A server whose open responses have `drain_s` to end after SIGTERM; then they get an error, then a reset."""

    def __init__(self, config: uvicorn.Config, drain: Drain, drain_s: float) -> None:
        super().__init__(config)
        self.config.timeout_graceful_shutdown = ceil(drain_s + ERROR_S)
        self._drain, self._drain_s = drain, drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and end open responses."""
        self._drain.start()
        ending = asyncio.get_running_loop().call_later(self._drain_s, self._drain.end)
        await super().shutdown(sockets)
        ending.cancel()
        for connection in list(self.server_state.connections):
            if isinstance(connection, ClientConnection):
                connection.abort()  # pyright: ignore[reportUnknownMemberType] (the other classes of uvicorn have none)
        await asyncio.sleep(0)  # sockets are closed in the next iteration of the loop


def serve(settings: GatewaySettings, report: Callable[[str, bool], None], how_to_create_a_key: str) -> None:
    """Serve until SIGTERM or SIGINT, then wait up to `drain_s` for open streams to end.

    `report` is called with the base URL once the port is open, and with whether requests need an API key; if the log
    is JSON, this is a log line instead.
    `how_to_create_a_key` is the command that creates a key.

    Raises:
        InvalidSetting: the Redis URL is wrong, the address cannot be used, it needs a key and none exists, or the
            certificate cannot be used.
        HistoryUnavailable: the database with the keys cannot be used.
    """
    is_plain = configure_log(settings.log_format, settings.log_level)
    sys.set_int_max_str_digits(MAX_DIGITS)
    sys.setswitchinterval(SWITCH_S)
    _check_certificate(settings)
    keyring = _read_keys(settings, how_to_create_a_key)
    _allow_connections(settings.max_connections)
    drain = Drain()
    server = DrainingServer(_config(settings, keyring, drain), drain, settings.drain_s)
    with ended_by_thread_errors(_log_thread_error), open_port(settings) as listening:
        # For signals before uvicorn installs its handlers, and when it raises the signal again after it has stopped.
        signal.signal(signal.SIGTERM, server.handle_exit)
        host, port = listening.getsockname()[:2]
        scheme = "http" if settings.tls_cert is None else "https"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"
        if is_plain:
            report(url, keyring.is_required)
        else:
            queues = [queue.name for queue in settings.queues]
            log_event(LOG, "gateway started", {"url": url, "queues": queues, "needs_key": keyring.is_required})
        server.run(sockets=[listening])


def _log_thread_error(thread: str, error: BaseException) -> None:
    LOG.critical("Thread failed; ending the process", exc_info=error, extra={"fields": {"thread": thread}})


def _check_certificate(settings: GatewaySettings) -> None:
    if settings.tls_cert is None:
        return
    try:
        # Without a password, OpenSSL would prompt for the key's password on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except OSError as error:
        raise InvalidSetting(
            f"--tls-cert {settings.tls_cert} and --tls-key {settings.tls_key} cannot be used: {error.strerror or error}"
        ) from error


def _read_keys(settings: GatewaySettings, how_to_create: str) -> Keyring:
    keyring = Keyring(settings.database_url, is_required=settings.is_key_required)
    keyring.read()
    why = "--require-keys" if settings.is_key_required else ""
    if not is_loopback(settings.host):
        why = f"--host {settings.host}, which is not a loopback address,"
    if why and not keyring.has_active_keys:
        raise InvalidSetting(
            f"{why} needs API keys, and the database has no active one. "
            f"Create one: {how_to_create}. Or check --database-url."
        )
    return keyring


def _config(settings: GatewaySettings, keyring: Keyring, drain: Drain) -> uvicorn.Config:
    addresses = Addresses(settings.address_connections, settings.trusted_proxies)
    limits = ConnectionLimits(settings.arrival_limit_s, settings.read_limit_s, addresses)
    return uvicorn.Config(
        create_app(settings, keyring, drain),
        # uvicorn only calls the class.
        http=cast("type[asyncio.Protocol]", partial(ClientConnection, limits)),
        ws="none",
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        log_config=None,
        access_log=False,
        server_header=False,
        # By default, uvicorn trusts forwarded headers from 127.0.0.1.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


def open_port(settings: GatewaySettings) -> socket.socket:
    """Listen at the address of the settings.

    Raises:
        InvalidSetting: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidSetting(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from error
    # Accepted connections inherit it. asyncio does not set it, as this socket has no protocol: tokens would wait for
    # delayed acknowledgements of the client.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _allow_connections(num_connections: int) -> None:
    """Raise the limit of open files to what this many connections need; the default is often 1024."""
    num_files = num_connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < num_files:
        most = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < num_files:
            LOG.warning("Only %d open files are allowed, for up to %d clients: raise ulimit -n.", most, num_connections)
