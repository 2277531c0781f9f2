"""Open the database of the history, SQLite or PostgreSQL by URL, and check its schema.

HistoryError
├── BadDatabaseUrl     the URL names no supported database
├── HistoryRefused     no such database, a wrong user or password, or a file that cannot be written: a wrong setting
├── HistoryUnreachable the server does not answer: try again later
├── HistoryMissing     there are no tables yet
├── SchemaTooOld       `worker migrate` must run first
└── SchemaTooNew       a newer release has migrated it: update this one
"""

import json
import os
import re
import sqlite3
import time
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.event import listen
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from sluice.producer.contract.tables import SCHEMA_REVISION

BUSY_TIMEOUT_MS = 10_000
"""How long a connection to SQLite waits for another writer."""

SWITCH_POLL_S = 0.005

READ_ONLY = "sluice_is_read_only"
"""Execution option: the transaction only reads, so it does not take the write lock of SQLite."""

# Compact JSON without NaN. One shared encoder: creating one costs more than encoding.
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode

_REFUSED = re.compile(
    r"FATAL: +((?:database|role) .* does not exist|.*authentication failed.*|permission denied for database .*"
    r"|no pg_hba.conf entry .*)|(no password supplied)"
)
"""How PostgreSQL and its library refuse a connection for good. They give no SQLSTATE for one that is not made."""

_REFUSED_BY_SQLITE = (
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOTADB,
)  # fmt: skip

_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "sqlite": "sqlite+pysqlite"}


@dataclass(frozen=True, slots=True)
class JsonText:
    """A JSON value that is encoded already."""

    text: str = field(repr=False)


def compact_json(value: object) -> str:
    """Encode a value as JSON."""
    return value.text if isinstance(value, JsonText) else _encode(value)


class HistoryError(Exception):
    """The history cannot be used; the message states what to do."""


class BadDatabaseUrl(HistoryError):
    """Not the URL of a SQLite or PostgreSQL database."""


class HistoryRefused(HistoryError):
    """The database does not exist, refuses this user, or cannot be written."""


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


def open_database(text: str, *, is_writer: bool = False, patience_s: float | None = None) -> Engine:
    """Open a database by URL; connects at the first use.

    Args:
        text: `sqlite:///FILE` or `postgresql://…`.
        is_writer: On SQLite, each transaction takes the write lock at its beginning, so that it waits for other
            writers (up to `BUSY_TIMEOUT_MS`) instead of failing in the middle; and commits reach the disk. A connection
            with the execution option `READ_ONLY` does not take it.
        patience_s: On PostgreSQL, how long a connection, a statement and a network that is silent may take; None waits
            10 s for a connection, and without a limit for others.

    Raises:
        BadDatabaseUrl: see `database_url`.
    """
    url = database_url(text)
    if url.get_backend_name() == "sqlite":
        return _open_sqlite(url, is_writer=is_writer)
    try:
        return _open_postgres(url, patience_s)
    except ImportError as error:
        raise BadDatabaseUrl(f"PostgreSQL needs its driver ({error}): pip install 'psycopg[binary]'") from error


def why(error: SQLAlchemyError) -> str:
    """Return the error of the database, without the statement and its values, which may hold user data."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0]}"[:500].replace("\0", "")


def failure_of(error: SQLAlchemyError, url: URL) -> HistoryError:
    """Return the error of a database that could not be opened: refused for good, or unreachable now."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    if getattr(cause, "sqlite_errorcode", 0) & 0xFF in _REFUSED_BY_SQLITE:
        return HistoryRefused(f"{url.database} cannot be used as a SQLite database: {cause}")
    refused = _REFUSED.search(str(cause))
    if refused is not None:
        return HistoryRefused(f"the history's database refuses the connection: {refused[1] or refused[2]}")
    return HistoryUnreachable(f"the history's database failed: {why(error)}")


def check_writable(engine: Engine) -> str | None:
    """Check that a worker can use this history; return its schema, or None if it has no tables yet.

    A worker migrates SQLite when it starts. Changes nothing: a SQLite file that does not exist is not created.

    Raises:
        HistoryRefused, HistoryUnreachable, HistoryMissing, SchemaTooOld, SchemaTooNew: the message states what to do.
    """
    file = engine.url.database or ""
    is_sqlite = engine.dialect.name == "sqlite"
    if is_sqlite and not Path(file).exists():
        folder = Path(file).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            fault = "is not a folder" if not folder.is_dir() else "cannot be written"
            raise HistoryRefused(f"{file} cannot be used as a SQLite database: {folder} {fault}")
        return None
    try:
        with engine.connect() as connection:
            return check_schema(connection, is_migrated_at_start=is_sqlite)
    except SQLAlchemyError as error:
        raise failure_of(error, engine.url) from error


def nothing_at(path: object, what: str = "database") -> str:
    """Return the message for a SQLite file that does not exist."""
    return f"there is no {what} at {path} yet: a worker creates it, or `worker migrate`"


def schema_revision(connection: Connection) -> str | None:
    """Return the migration of the database; None if it has no tables of the history."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def check_schema(connection: Connection, *, is_migrated_at_start: bool = False) -> str | None:
    """Return the schema. Check that it is that of this release, or with `is_migrated_at_start` not newer.

    Raises:
        HistoryMissing, SchemaTooOld, SchemaTooNew: they are not; the message states what to do.
    """
    found = schema_revision(connection)
    if is_migrated_at_start and (found is None or found <= SCHEMA_REVISION):
        return found
    if found is None:
        raise HistoryMissing("the database has no history yet; run `worker migrate` with this --database-url")
    if found < SCHEMA_REVISION:
        raise SchemaTooOld(
            f"the history has schema {found}; this release needs {SCHEMA_REVISION}: run `worker migrate`"
        )
    if found > SCHEMA_REVISION:
        raise SchemaTooNew(f"the history has schema {found}; this release knows {SCHEMA_REVISION}: update it")
    return found


def _open_postgres(url: URL, patience_s: float | None) -> Engine:
    limits = {"connect_timeout": 10}
    if patience_s is not None:
        whole_s = ceil(patience_s)
        limits = {
            "connect_timeout": whole_s,
            "tcp_user_timeout": whole_s * 1000,
            "keepalives_idle": whole_s,
            "keepalives_interval": 1,
            "keepalives_count": 3,
        }
    engine = sa.create_engine(
        url,
        pool_pre_ping=True,
        pool_recycle=1800,
        pool_timeout=30 if patience_s is None else patience_s,
        connect_args={"application_name": "sluice", **limits},
        json_serializer=compact_json,
    )

    def limit(connection: Any, _record: object) -> None:  # noqa: ANN401  # the driver may be missing
        # Not as an option of the connection: poolers refuse those.
        connection.autocommit = True
        connection.execute(f"SET statement_timeout = {ceil(patience_s or 0) * 1000}")
        connection.autocommit = False

    if patience_s is not None:
        listen(engine, "connect", limit)
    return engine


def _open_sqlite(url: URL, *, is_writer: bool) -> Engine:
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000}, json_serializer=compact_json)

    def configure(connection: sqlite3.Connection, _record: object) -> None:
        # By default, the driver begins transactions itself, only before a change and without the write lock.
        connection.isolation_level = None
        _use_wal(connection)
        connection.execute(f"PRAGMA synchronous = {'FULL' if is_writer else 'NORMAL'}")

    def begin(connection: Connection) -> None:
        is_reading = not is_writer or connection.get_execution_options().get(READ_ONLY)
        connection.exec_driver_sql("BEGIN" if is_reading else "BEGIN IMMEDIATE")

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
