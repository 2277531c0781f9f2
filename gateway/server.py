"""Run the gateway in a process of its own."""

import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable

import uvicorn

from sluice.gateway.app import create_app
from sluice.gateway.arrival.addresses import Addresses
from sluice.gateway.arrival.connection import ArrivingConnection
from sluice.gateway.connections.connection import Connection
from sluice.gateway.connections.drain import Drain
from sluice.gateway.connections.server import Server, allow_connections
from sluice.gateway.keyring import Keyring
from sluice.gateway.log.lines import configure_log, log_event
from sluice.gateway.settings import GatewaySettings, is_loopback
from sluice.producer.errors import InvalidSetting
from sluice.protocol.host.thread_errors import ended_by_thread_errors

LOG = logging.getLogger(__name__)
KEEP_ALIVE_S = 75
BACKLOG = 2048
SWITCH_S = 0.001
"""How long the event loop waits for a thread that makes a large answer, each time that it has something to do."""

MAX_DIGITS = 640
"""Of an integer in JSON: thousands with Python's 4300 digits take the event loop for 100 ms. It allows no fewer."""


def serve(settings: GatewaySettings, report: Callable[[str, bool], None], how_to_create_a_key: str) -> None:
    """Serve until SIGTERM or SIGINT, then let open streams end for up to `drain_s`.

    `report` is called with the base URL once the port is open, and with whether requests need an API key; if the log
    is JSON, a line of it says so instead.
    `how_to_create_a_key` is the command that does.

    Raises:
        InvalidSetting: the Redis URL is wrong, the address cannot be used, it needs a key and there is none, or the
            certificate cannot be used.
        HistoryUnavailable: the database with the keys cannot be used.
    """
    is_plain = configure_log(settings.log_format, settings.log_level)
    sys.set_int_max_str_digits(MAX_DIGITS)
    sys.setswitchinterval(SWITCH_S)
    _check_certificate(settings)
    keyring = _read_keys(settings, how_to_create_a_key)
    allow_connections(settings.max_connections)
    drain = Drain()
    server = Server(_config(settings, keyring, drain), drain, settings.drain_s)
    with ended_by_thread_errors(_log_thread_error), open_port(settings) as listening:
        # Also before uvicorn installs its handlers, and when it raises the signal again after it has stopped.
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
        # Without a password, OpenSSL would ask for that of the key on the terminal.
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


def _connection_class(settings: GatewaySettings) -> type[ArrivingConnection]:
    """Return the class of connections; uvicorn gives it no settings."""

    class BoundedConnection(ArrivingConnection, Connection):
        """A connection of this gateway."""

        arrival_limit_s, read_limit_s = settings.arrival_limit_s, settings.read_limit_s
        addresses = Addresses(settings.address_connections, settings.trusted_proxies)

    return BoundedConnection


def _config(settings: GatewaySettings, keyring: Keyring, drain: Drain) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(settings, keyring, drain),
        http=_connection_class(settings),
        ws="none",
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        log_config=None,
        access_log=False,
        server_header=False,
        # By default uvicorn believes what 127.0.0.1 says of its clients.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


def open_port(settings: GatewaySettings) -> socket.socket:
    """Listen at the address of the settings.

    Raises:
        InvalidSetting: it cannot be used.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidSetting(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from error
    # Accepted connections inherit it. asyncio does not set it, as this socket names no protocol: tokens would wait for
    # delayed acknowledgements of the client.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
