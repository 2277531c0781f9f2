"""URLs of the queue's server: a single server, a primary behind Sentinels, or the nodes of a Cluster. No I/O.

redis://[USER:PASSWORD@]HOST:PORT/DB[?OPTION=VALUE]           (rediss:// for TLS)
unix://[USER:PASSWORD@]/PATH[?db=DB]
redis+sentinel://[USER:PASSWORD@]HOST:PORT[,…]/SERVICE/DB     (rediss+sentinel:// for TLS)
redis+cluster://[USER:PASSWORD@]HOST:PORT[,…][?OPTION=VALUE]  (rediss+cluster:// for TLS)

`url_options` has the options.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from sluice.protocol.errors import InvalidSetting
from sluice.protocol.redis.url_options import SENTINEL, read_database, read_options

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
HOW = (
    "Give one of redis://HOST:PORT/DB, rediss://…, unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB, "
    "redis+cluster://HOST:PORT,HOST:PORT."
)
_HOW_TO_ESCAPE = "in a user name or password, write / as %2F, ? as %3F, # as %23, [ as %5B, ] as %5D and @ as %40"

PORT = 6379
SENTINEL_PORT = 26379

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PATHS = ("sqlite:", "unix:///")
"""Prefixes of URLs that name a file and no user."""

_SECRET_OPTION = re.compile(r"([?&][^=&]*(?:password|secret|token)[^=&]*=)[^&]*", re.IGNORECASE)

Address: TypeAlias = tuple[str, int]
"""Host and port."""


def redacted(url: str) -> str:
    """Return a URL, which may be malformed, without its secrets, for messages."""
    shown = _SECRET_OPTION.sub(r"\1***", url)
    if url.lower().startswith(_PATHS):
        return shown
    match = _SCHEME.match(shown)
    scheme, rest = (match.group(), shown[match.end() :]) if match else ("", shown)
    # Up to the last `@`, because a password that is not escaped may contain any character.
    user, at, host = rest.rpartition("@")
    if not at:
        return shown
    name, colon, _ = user.partition(":") if scheme else ("***", "", "")
    return f"{scheme}{name}{':***' if colon else ''}@{host}"


def reason_of(url: str, error: ValueError) -> str:
    """Return why a URL cannot be read, without its secrets."""
    # The error quotes the text in the place of a port or an option, which may be a part of the password.
    return _HOW_TO_ESCAPE if _has_unescaped_user(url) else str(error)


def cannot_read(url: str, error: ValueError) -> InvalidSetting:
    """Return the error of a URL that cannot be read; the message does not contain its secrets."""
    return InvalidSetting(f"cannot read the URL {redacted(url)!r}: {reason_of(url, error)}. {HOW}")


def _has_unescaped_user(url: str) -> bool:
    """Return whether urllib finds the end of user and password before the last `@` of a URL."""
    try:
        authority = urlsplit(url).netloc
    except ValueError:
        return "@" in url
    return url.count("@") != authority.count("@")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelUrl:
    """Addresses of the Sentinels, the service, and the connection options of both. May contain passwords."""

    addresses: list[Address]
    service: str
    sentinel_options: dict[str, Any]  # Any: redis-py's keyword arguments
    options: dict[str, Any]


def read_sentinel_url(url: str, options: Mapping[str, Any]) -> SentinelUrl:
    """Parse redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/SERVICE/DB?OPTIONS, with `options` as defaults.

    Options that begin with `sentinel_` apply to the connections to the Sentinels; those of sockets apply to both.

    Raises:
        ValueError: the service is missing, a port or database number is not a number, or an option is refused.
            `cannot_read` adds the URL.
    """
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service or not hosts:
        raise ValueError("it names no sentinels or no service")
    name, _, password = user.partition(":")
    of_url: dict[str, Any] = read_options(url)
    of_url |= {key: unquote(value) for key, value in (("username", name), ("password", password)) if value}
    try:
        addresses = [_address(host, SENTINEL_PORT) for host in hosts.split(",")]
    except ValueError as error:
        raise ValueError("a port is not a number") from error
    of_url["db"] = read_database(db, of_url)
    both: dict[str, Any] = {"ssl": True} if parts.scheme.startswith("rediss") else {}
    shared = {key: value for key, value in options.items() if key.startswith(("socket_", "retry"))}
    own = {key.removeprefix(SENTINEL): value for key, value in of_url.items() if key.startswith(SENTINEL)}
    rest = {key: value for key, value in of_url.items() if not key.startswith(SENTINEL)}
    return SentinelUrl(
        addresses=addresses,
        service=unquote(service),
        sentinel_options={**shared, **both, **own},
        options={**options, **both, **rest},
    )


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """The nodes to ask first, and the options for a connection to any node."""

    seeds: tuple[Address, ...]
    _scheme: str
    _credentials: str
    _query: str

    def url_of(self, address: Address) -> str:
        """Return the redis:// or rediss:// URL of one node."""
        host, port = address
        shown = f"[{host}]" if ":" in host else host
        return f"{self._scheme}://{self._credentials}{shown}:{port}/0{self._query}"


def is_cluster(url: str) -> bool:
    """Return whether a URL is one of a Cluster."""
    return "+cluster://" in url


def read_cluster_url(url: str) -> ClusterUrl:
    """Parse a Cluster's URL.

    Raises:
        ValueError: no node is named, a port is not a number, an option is refused, or a database is named, of which a
            Cluster has only one.
    """
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    if not hosts:
        raise ValueError("expected redis+cluster://HOST:PORT,HOST:PORT")
    if parts.path.strip("/") not in ("", "0") or read_options(url).get("db"):
        raise ValueError("a Cluster has no database numbers")
    query = f"?{parts.query}" if parts.query else ""
    seeds = tuple(_address(host, PORT) for host in hosts.split(","))
    return ClusterUrl(seeds, parts.scheme.removesuffix("+cluster"), credentials + at, query)


def _address(host: str, default_port: int) -> Address:
    name, colon, port = host.rpartition(":")
    return (name.strip("[]"), int(port)) if colon else (host, default_port)
