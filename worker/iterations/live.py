"""The iterations of a worker on this host, from its metrics server."""

from collections.abc import Generator
from http.client import HTTPException
from ipaddress import ip_address
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from sluice.worker.config import MetricsConfig
from sluice.worker.errors import NotReady

QUIET_S = 10.0
"""A worker that is silent for this long has ended: it sends something every second."""

_DIRECT = build_opener(ProxyHandler({}))
"""Asks without the proxies of the environment: the worker is on this host."""


def live_iterations(config: MetricsConfig, *, has_all: bool) -> Generator[str]:
    """Yield the lines that a worker writes, until it ends.

    Raises:
        NotReady: no worker answers there.
    """
    address = f"{_host(config.host)}:{config.port}"
    try:
        with _DIRECT.open(f"http://{address}/iterations{'?all' if has_all else ''}", timeout=QUIET_S) as lines:
            yield from (line.decode(errors="replace").rstrip("\n") for line in lines if line.strip())
    except (URLError, OSError, HTTPException) as error:
        raise NotReady(
            f"no worker serves its iterations at {address}: {error}. The worker logs its address as `metrics served`"
        ) from error


def _host(host: str) -> str:
    """Return the address of this host for a server that listens on `host`."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return host if address.version == 4 else f"[{host}]"
