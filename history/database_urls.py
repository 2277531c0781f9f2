"""URLs of the history's database, and the one table of the options that they may have. Knows no connection.

An option that the product relies on, that would change what it sends, or that is a secret, is refused: URLs are logged
with their options, and a pooler may give each transaction another session.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from sluice.protocol.checks import MAX_PORT

EXPECTED = "expected sqlite:///FILE or postgresql://USER@HOST/NAME"

_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "sqlite": "sqlite+pysqlite"}


class BadUrl(ValueError):
    """Not a database URL that is supported; the message says why."""


@dataclass(frozen=True, slots=True)
class PostgresOption:
    """An option of a PostgreSQL URL, after the `?`."""

    meaning: str
    accepts: str
    """Its values, in words."""

    takes: Callable[[str], bool]
    """Whether a value is one of them."""


def _text(meaning: str) -> PostgresOption:
    return PostgresOption(meaning, "text", bool)


def _one_of(meaning: str, *values: str) -> PostgresOption:
    return PostgresOption(meaning, ", ".join(f"`{value}`" for value in values), values.__contains__)


def _whole(meaning: str, least: int, most: int) -> PostgresOption:
    def takes(value: str) -> bool:
        return value.isascii() and value.isdigit() and len(value) < 10 and least <= int(value) <= most

    return PostgresOption(meaning, f"{least} to {most}", takes)


_SESSION = re.compile(r"-c ?search_path=[\w,\"$]+|(endpoint|project)=[\w.-]+")
_PORTS = re.compile(r"[0-9]{1,5}(,[0-9]{1,5})*")
_TLS = ("TLSv1.2", "TLSv1.3")

POSTGRES_OPTIONS: Mapping[str, PostgresOption] = {
    "host": _text("a host, or host:port, or the folder of a socket; give it several times for several hosts"),
    "hostaddr": _text("its address, to skip the look-up of the name"),
    "port": PostgresOption(
        "its port, or one for each host", "numbers with commas", lambda value: _PORTS.fullmatch(value) is not None
    ),
    "target_session_attrs": _one_of("which of several hosts to use", "any", "read-write", "primary"),
    "load_balance_hosts": _one_of("their order", "disable", "random"),
    "application_name": _text("the name that the server shows; `sluice` if not given"),
    "connect_timeout": _whole("seconds for a connection, 10 if not given; the gateway waits 5 at most", 2, 60),
    "keepalives": _one_of("whether silent connections are probed", "0", "1"),
    "keepalives_idle": _whole("seconds of silence before a probe; the gateway has its own", 0, 86_400),
    "keepalives_interval": _whole("seconds between probes; likewise", 0, 86_400),
    "keepalives_count": _whole("unanswered probes that end a connection; likewise", 0, 1_000),
    "tcp_user_timeout": _whole("ms that sent data may stay unanswered; likewise", 0, 86_400_000),
    "sslmode": _one_of("TLS", "disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    "sslnegotiation": _one_of("how TLS begins", "postgres", "direct"),
    "sslrootcert": _text("file of the authorities, or `system`"),
    "sslcert": _text("file of the client's certificate"),
    "sslkey": _text("file of its key, without a password"),
    "sslcertmode": _one_of("whether the certificate is sent", "disable", "allow", "require"),
    "sslcrl": _text("file of revoked certificates"),
    "sslcrldir": _text("folder of revoked certificates"),
    "sslsni": _one_of("whether the host is named in the handshake", "0", "1"),
    "ssl_min_protocol_version": _one_of("oldest TLS", *_TLS),
    "ssl_max_protocol_version": _one_of("newest TLS", *_TLS),
    "channel_binding": _one_of("binding of the password to TLS", "disable", "prefer", "require"),
    "require_auth": _text("accepted methods of authentication"),
    "requirepeer": _text("user that must own the socket's server"),
    "gssencmode": _one_of("encryption by Kerberos", "disable", "prefer", "require"),
    "krbsrvname": _text("name of the Kerberos service"),
    "passfile": _text("file of passwords"),
    "service": _text("section of the service file, with further parameters"),
    "options": PostgresOption(
        "a schema of its own, or the project at a hosted server; poolers refuse a schema here: `ALTER ROLE … SET` it",
        "`-csearch_path=SCHEMA`, `endpoint=ID`, `project=ID`",
        lambda value: _SESSION.fullmatch(value) is not None,
    ),
}
"""The options of a PostgreSQL URL that are served, each with the values that it may have. All others are refused."""


def parse_database_url(text: str) -> URL:
    """Parse and check a database URL; `postgres://` and `postgresql://` mean psycopg 3.

    Raises:
        BadUrl: another kind of database, one that would not last, an option that is not supported, or not a URL.
    """
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise BadUrl(f"not a database URL; {EXPECTED}") from error
    except ValueError as error:  # its port: a part of a password, perhaps
        raise BadUrl(
            "its port is not a number: write @, / and : in a password as %40, %2F and %3A, and several hosts as"
            " postgresql://USER@/NAME?host=A:5432&host=B:5432"
        ) from error
    driver = _DRIVERS.get(url.drivername, url.drivername)
    if driver not in _DRIVERS.values():
        raise BadUrl(f"{url.drivername} is not supported; {EXPECTED}")
    parts = (url.host, url.username, url.password, url.database, str(url.query))
    if any(not character.isprintable() for part in parts for character in str(part)):
        raise BadUrl("it has a control character")
    (_check_sqlite if driver == "sqlite+pysqlite" else _check_postgres)(url)
    return url.set(drivername=driver)


def _check_sqlite(url: URL) -> None:
    if url.query:
        raise BadUrl(f"a SQLite URL has no options, got {', '.join(sorted(url.query))}; expected sqlite:///FILE")
    if url.host or url.username or url.port:
        raise BadUrl("a SQLite URL has no host: sqlite:///FILE has three slashes, an absolute path four")
    file = url.database or ":memory:"
    if ":memory:" in file or file.startswith("file:"):
        raise BadUrl("a SQLite database in memory is lost with each connection; expected sqlite:///FILE")


def _check_postgres(url: URL) -> None:
    if url.port is not None and not 0 < url.port <= MAX_PORT:
        raise BadUrl(f"its port must be 1 to {MAX_PORT}, got {url.port}")
    for name, given in url.query.items():
        option = POSTGRES_OPTIONS.get(name)
        if option is None:
            raise BadUrl(f"the option {name!r} is not supported; supported are {', '.join(POSTGRES_OPTIONS)}")
        values = (given,) if isinstance(given, str) else given
        if len(values) > 1 and name != "host":
            raise BadUrl(f"the option {name!r} is given {len(values)} times")
        wrong = next((value for value in values if not option.takes(value)), None)
        if wrong is not None:
            raise BadUrl(f"the option {name!r} must be {option.accepts.replace('`', '')}, got {wrong[:50]!r}")
