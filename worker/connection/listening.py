"""The address of the worker's metrics: the first free port, or the setting that is wrong."""

import errno
import os
import socket

from sluice.protocol.checks import MAX_PORT
from sluice.worker.config import MetricsConfig
from sluice.worker.errors import ConfigError

PORTS_TRIED = 20
"""Ports to try, from the configured one, before the worker continues without metrics."""


def ports_of(config: MetricsConfig) -> range:
    """Return the ports to try, in order; port 0 stands for any."""
    return range(config.port, min(config.port + PORTS_TRIED, MAX_PORT + 1)) if config.port else range(1)


def listen(config: MetricsConfig) -> socket.socket | None:
    """Listen on the first free port of `ports_of`. Return None if all of them are taken.

    Raises:
        ConfigError: this host has no such address, or this user may not listen on the port.
    """
    for port in ports_of(config):
        try:
            return _listen_on(config.host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _wrong(config, port, error) from error
    return None


def _listen_on(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    # With SO_REUSEADDR, a restarted worker gets its port back, though connections to the one before are in TIME_WAIT.
    # A port on which another one listens stays taken (SO_REUSEPORT would share it).
    return socket.create_server((str(address[0]), port), family=socket.AddressFamily(family))


def _wrong(config: MetricsConfig, port: int, error: OSError) -> ConfigError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(
            [f"SLUICE_METRICS_PORT: this user may not listen on port {port}: give another, from 1024 up"]
        )
    reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    return ConfigError(
        [
            f"SLUICE_METRICS_HOST: {config.host} is not an address of this host ({reason}): give one of its addresses, "
            f"such as 127.0.0.1 or 0.0.0.0"
        ]
    )
