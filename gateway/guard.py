"""Refuse requests that a web page made: without keys, any page that the user opens could read the queue.

A page reaches a loopback server through its own host name (DNS rebinding), or from a foreign origin.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers

from sluice.gateway.errors import bad_request
from sluice.gateway.settings import is_loopback


def check_loopback(headers: Headers) -> None:
    """Check that Host, and Origin if there is one, are loopback names.

    Raises:
        HttpError: one is not.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if not is_loopback(_host_of(f"//{host}")):
        raise bad_request(f"Host must be a loopback name, got {host!r}", code="host_refused", status=421)
    if origin is not None and not is_loopback(_host_of(origin)):
        raise bad_request(f"requests from {origin!r} are refused", code="origin_refused", status=403)


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
