"""Settings of the client: arguments, then the environment, then the embedded server.

Only this module reads the environment, from a mapping passed to it. No I/O.

    SLUICE_REDIS_URL      redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL of the queue's server
    SLUICE_DATABASE_URL   SQLAlchemy URL of the job history
    SLUICE_STATE_DIR      folder of the embedded server and of journals; default $XDG_STATE_HOME/sluice
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from sluice.producer.errors import InvalidSetting

REDIS_URL = "SLUICE_REDIS_URL"
DATABASE_URL = "SLUICE_DATABASE_URL"
STATE_DIR = "SLUICE_STATE_DIR"

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
HOW = (
    "Give one of redis://HOST:PORT/DB, rediss://…, unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB, "
    "redis+cluster://HOST:PORT,HOST:PORT."
)


SENTINEL = "sentinel_"
"""Prefix of the options for connections to the Sentinels."""


def redis_url(argument: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the checked URL of the server; None means the embedded server.

    Raises:
        InvalidSetting: the URL has an unknown scheme.
    """
    url, name = (argument, "the URL") if argument else (environ.get(REDIS_URL), REDIS_URL)
    if not url:
        return None
    if urlsplit(url).scheme not in SCHEMES:
        raise InvalidSetting(f"{name} is not a Redis URL: {redacted(url)!r}. {HOW}")
    return url


def database_url(argument: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the SQLAlchemy URL of the job history: the argument, the environment, or SQLite in the state folder."""
    return argument or environ.get(DATABASE_URL) or f"sqlite:///{history_path(environ)}"


def history_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the SQLite history next to the embedded server."""
    return state_dir(environ) / "history.db"


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for persistent state (XDG Base Directory Specification, state home)."""
    if own := environ.get(STATE_DIR):
        return Path(own).expanduser().absolute()
    home = environ.get("XDG_STATE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path("~/.local/state").expanduser()
    return base / "sluice"


def redacted(url: str) -> str:
    """Return the URL without its secrets, for messages."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if at:
        name, colon, _ = user.partition(":")
        host = f"{name}{':***' if colon else ''}@{host}"
    query = re.sub(r"((?:^|&)[^=&]*(?:password|secret|token)[^=&]*=)[^&]*", r"\1***", parts.query, flags=re.IGNORECASE)
    return f"{parts.scheme}://{host}{parts.path}{'?' if query else ''}{query}" if parts.scheme else parts.path


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelUrl:
    """Addresses of the Sentinels, the service, and the connection options of both. May hold passwords."""

    addresses: list[tuple[str, int]]
    service: str
    sentinel_options: dict[str, Any]  # Any: redis-py's keyword arguments
    options: dict[str, Any]


def read_sentinel_url(url: str, options: Mapping[str, Any]) -> SentinelUrl:
    """Read redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/SERVICE/DB?OPTIONS, with `options` as defaults.

    Options that begin with `sentinel_` apply to the connections to the Sentinels; timeouts apply to both.

    Raises:
        InvalidSetting: the service is missing, or a port or database number is not a number.
    """
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service or not hosts:
        raise InvalidSetting(f"{redacted(url)!r} names no sentinels or no service. {HOW}")
    name, _, password = user.partition(":")
    given: dict[str, Any] = dict(parse_qsl(parts.query))
    given |= {key: unquote(value) for key, value in (("username", name), ("password", password)) if value}
    try:
        given["db"] = int(db or 0)
        addresses = [_address(host) for host in hosts.split(",")]
    except ValueError as error:
        raise InvalidSetting(f"a port or database of {redacted(url)!r} is not a number. {HOW}") from error
    both: dict[str, Any] = {"ssl": True} if parts.scheme.startswith("rediss") else {}
    shared = {key: value for key, value in options.items() if key.startswith(("socket_", "retry"))}
    own = {key.removeprefix(SENTINEL): value for key, value in given.items() if key.startswith(SENTINEL)}
    rest = {key: value for key, value in given.items() if not key.startswith(SENTINEL)}
    return SentinelUrl(
        addresses=addresses,
        service=unquote(service),
        sentinel_options={**shared, **both, **own},
        options={**options, **both, **rest},
    )


def _address(host: str) -> tuple[str, int]:
    name, colon, port = host.rpartition(":")
    return (name.strip("[]"), int(port)) if colon else (host, 26379)
