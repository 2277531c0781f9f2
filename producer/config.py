"""Where the queue and the history are: arguments, then the environment, then the embedded default.

Only this file reads the environment, from a mapping it is given. Knows no server and opens nothing.

    SLUICE_REDIS_URL      redis://, rediss://, unix:// or redis+sentinel:// URL of the queue's server
    SLUICE_DATABASE_URL   SQLAlchemy URL of the job history
    SLUICE_STATE_DIR      folder of the embedded server and of journals; default $XDG_STATE_HOME/sluice
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from producer.errors import InvalidSetting

REDIS_URL = "SLUICE_REDIS_URL"
DATABASE_URL = "SLUICE_DATABASE_URL"
STATE_DIR = "SLUICE_STATE_DIR"

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
HOW = "Give one of redis://HOST:PORT/DB, rediss://…, unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB."


def redis_url(argument: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The server's URL, checked; None means the embedded one.

    Raises:
        InvalidSetting: it is not a URL of a kind that is known here.
    """
    url, name = (argument, "the URL") if argument else (environ.get(REDIS_URL), REDIS_URL)
    if not url:
        return None
    if urlsplit(url).scheme not in SCHEMES:
        raise InvalidSetting(f"{name} is not a Redis URL: {redacted(url)!r}. {HOW}")
    return url


def database_url(argument: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """SQLAlchemy URL of the job history: the argument, the environment, or SQLite in the state folder."""
    return argument or environ.get(DATABASE_URL) or f"sqlite:///{history_path(environ)}"


def history_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The SQLite history beside the embedded server."""
    return state_dir(environ) / "history.db"


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's folder for what must outlive a process (`XDG Base Directory Specification`, state home)."""
    if own := environ.get(STATE_DIR):
        return Path(own).expanduser().absolute()
    home = environ.get("XDG_STATE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path("~/.local/state").expanduser()
    return base / "sluice"


def redacted(url: str) -> str:
    """The URL without its secrets, for messages."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if at:
        name, colon, _ = user.partition(":")
        host = f"{name}{':***' if colon else ''}@{host}"
    query = re.sub(r"((?:^|&)[^=&]*(?:password|secret|token)[^=&]*=)[^&]*", r"\1***", parts.query, flags=re.IGNORECASE)
    return f"{parts.scheme}://{host}{parts.path}{'?' if query else ''}{query}" if parts.scheme else parts.path


def sentinel_parts(url: str) -> tuple[list[tuple[str, int]], str, dict[str, str | int]]:
    """Sentinel addresses, service name and options (db, username, password, sentinel_*) of a redis+sentinel:// URL.

    Raises:
        InvalidSetting: the service is missing, or a port or database number is not a number.
    """
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service or not hosts:
        raise InvalidSetting(f"{redacted(url)!r} names no sentinels or no service. {HOW}")
    options: dict[str, str | int] = dict(parse_qsl(parts.query))
    name, _, password = user.partition(":")
    options |= {key: unquote(value) for key, value in (("username", name), ("password", password)) if value}
    try:
        options["db"] = int(db or 0)
        return [_address(host) for host in hosts.split(",")], unquote(service), options
    except ValueError as error:
        raise InvalidSetting(f"a port or database of {redacted(url)!r} is not a number. {HOW}") from error


def _address(host: str) -> tuple[str, int]:
    name, colon, port = host.rpartition(":")
    return (name.strip("[]"), int(port)) if colon else (host, 26379)
