"""Open the database of the history, SQLite or PostgreSQL by URL, and check its schema.

HistoryError
├── BadDatabaseUrl     the URL names no supported database
├── HistoryUnreachable the server does not answer, or refuses this user: try again later
├── HistoryMissing     there are no tables yet
├── SchemaTooOld       `worker migrate` must run first
└── SchemaTooNew       a newer release has migrated it: update this one
"""

import json
import sqlite3
import time

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.event import listen
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from sluice.producer.contract.tables import SCHEMA_REVISION

BUSY_TIMEOUT_MS = 10_000
"""How long a connection to SQLite waits for another writer."""

SWITCH_POLL_S = 0.005

# Compact JSON without NaN. One shared encoder: creating one costs more than encoding.
_compact_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode

_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "sqlite": "sqlite+pysqlite"}


class HistoryError(Exception):
    """The history cannot be used; the message states what to do."""


class BadDatabaseUrl(HistoryError):
    """Not the URL of a SQLite or PostgreSQL database."""


class HistoryUnreachable(HistoryError):
    """The database does not answer."""


class HistoryMissing(HistoryError):
    """The database has no history yet."""


class SchemaTooOld(HistoryError):
    """The tables are older than this program."""


class SchemaTooNew(HistoryError):
    """The tables are newer than this program."""


def database_url(text: str) -> URL:
    """Parse a database URL; `postgres://` and `postgresql://` mean psycopg 3.

    Raises:
        BadDatabaseUrl: another kind of database, or not a URL.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise BadDatabaseUrl(f"not a database URL; expected sqlite:///FILE or postgresql://… ({error})") from error
    driver = _DRIVERS.get(url.drivername, url.drivername)
    if driver not in _DRIVERS.values():
        raise BadDatabaseUrl(f"{url.drivername} is not supported; expected sqlite:///FILE or postgresql://…")
    return url.set(drivername=driver)


def open_database(text: str, *, is_writer: bool = False) -> Engine:
    """Open a database by URL; connects at the first use.

    Args:
        text: `sqlite:///FILE` or `postgresql://…`.
        is_writer: On SQLite, each transaction takes the write lock at its beginning, so that it waits for other
            writers (up to `BUSY_TIMEOUT_MS`) instead of failing in the middle; and commits reach the disk.

    Raises:
        BadDatabaseUrl: see `database_url`.
    """
    url = database_url(text)
    if url.get_backend_name() == "sqlite":
        return _open_sqlite(url, is_writer=is_writer)
    connect_args = {"connect_timeout": 10, "application_name": "sluice"}
    return sa.create_engine(
        url, pool_pre_ping=True, pool_recycle=1800, connect_args=connect_args, json_serializer=_compact_json
    )


def why(error: SQLAlchemyError) -> str:
    """Return the error of the database, without the statement and its values, which may hold user data."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0]}"[:500].replace("\0", "")


def schema_revision(connection: Connection) -> str | None:
    """Return the migration of the database; None if it has no tables of the history."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def check_schema(connection: Connection) -> None:
    """Check that the tables are those of this release.

    Raises:
        HistoryMissing, SchemaTooOld, SchemaTooNew: they are not; the message states what to do.
    """
    found = schema_revision(connection)
    if found is None:
        raise HistoryMissing("the database has no history yet; run `worker migrate` with this --database-url")
    if found < SCHEMA_REVISION:
        raise SchemaTooOld(
            f"the history has schema {found}; this release needs {SCHEMA_REVISION}: run `worker migrate`"
        )
    if found > SCHEMA_REVISION:
        raise SchemaTooNew(f"the history has schema {found}; this release knows {SCHEMA_REVISION}: update it")


def _open_sqlite(url: URL, *, is_writer: bool) -> Engine:
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000}, json_serializer=_compact_json)

    def configure(connection: sqlite3.Connection, _record: object) -> None:
        # By default, the driver begins transactions itself, only before a change and without the write lock.
        connection.isolation_level = None
        _use_wal(connection)
        connection.execute(f"PRAGMA synchronous = {'FULL' if is_writer else 'NORMAL'}")

    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")

    listen(engine, "connect", configure)
    listen(engine, "begin", begin)
    return engine


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead logging; SQLite does not wait while another connection switches."""
    deadline_s = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(SWITCH_POLL_S)
        else:
            return
