"""Open the database of the history, SQLite or PostgreSQL by URL, and check its schema.

HistoryError
├── BadDatabaseUrl     the URL names no supported database
├── HistoryRefused     no such database, a wrong user or password, or a file that cannot be written: a wrong setting
├── HistoryUnreachable the server does not answer: try again later
├── HistoryMissing     there are no tables yet
├── SchemaTooOld       a development version made it: use an empty database
└── SchemaTooNew       a newer release has migrated it: update this one
"""

import json
import os
import re
import sqlite3
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.event import listen
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from sluice.history.database_urls import BadUrl, parse_database_url
from sluice.history.tables import SCHEMA_REVISION

BUSY_TIMEOUT_MS = 10_000
"""How long a connection to SQLite waits for another writer."""

SWITCH_POLL_S = 0.005

VERSION_TABLE = "sluice_alembic_version"
"""Alembic's table with the migration of this database. Another program may use Alembic in it, under its own name."""

READ_ONLY = "sluice_is_read_only"
"""Execution option: the transaction only reads, so it does not take the write lock of SQLite."""

# Compact JSON without NaN. One shared encoder: creating one costs more than encoding.
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode

_REFUSED = re.compile(
    r"FATAL: +((?:database|role) .* does not exist|.*authentication failed.*|permission denied for database .*"
    r"|no pg_hba.conf entry .*|no such (?:database|user).*|unsupported startup parameter.*|no such role.*)"
    r"|(no password supplied|transaction blocks not allowed in statement pooling mode"
    r"|invalid (?:port number|integer value|\S+ value).*|definition of service .* not found"
    r"|(?:root certificate|certificate|private key) file .*|could not (?:read|load) (?:root )?certificate .*"
    r"|server does not support SSL.*|SSL error: certificate verify failed|server certificate for .* does not match.*)"
)
"""How PostgreSQL, its library and PgBouncer refuse for good. A connection that fails has no SQLSTATE."""

_EXISTS = re.compile(r"((?:relation|table|index|view) \S+ already exists|there is already an? \w+ named \S+)")

_REFUSED_BY_SQLITE = (
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOTADB,
)  # fmt: skip


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
    """The tables are of a development version; no migration knows them."""


class SchemaTooNew(HistoryError):
    """The tables are newer than this program."""


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
        BadDatabaseUrl: another kind of database, an option that is not supported, or not a URL.
    """
    try:
        url = parse_database_url(text)
        if url.get_backend_name() == "sqlite":
            return _open_sqlite(url, is_writer=is_writer)
        return _open_postgres(url, patience_s)
    except BadUrl as error:
        raise BadDatabaseUrl(f"the database URL cannot be used: {error}") from error
    except ImportError as error:
        raise BadDatabaseUrl(f"PostgreSQL needs its driver ({error}): pip install 'psycopg[binary]'") from error


@contextmanager
def opened_database(text: str, *, is_writer: bool = False) -> Generator[Engine]:
    """Open a database by URL, as `open_database`, and close its connections at the end.

    Raises:
        BadDatabaseUrl: see `open_database`.
    """
    engine = open_database(text, is_writer=is_writer)
    try:
        yield engine
    finally:
        engine.dispose()


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
    exists = _EXISTS.search(str(cause))
    if exists is not None:
        return HistoryRefused(
            f"the database has tables of another program whose names the history needs: {exists[1]}. Give it a"
            " database of its own, or on PostgreSQL a schema of its own: ?options=-csearch_path=SCHEMA"
        )
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
            if not is_sqlite:
                _check_not_read_only(connection)
            return check_schema(connection, may_be_missing=is_sqlite)
    except SQLAlchemyError as error:
        raise failure_of(error, engine.url) from error


def _check_not_read_only(connection: Connection) -> None:
    if connection.exec_driver_sql("SHOW transaction_read_only").scalar_one() == "on":
        raise HistoryUnreachable("the history's database is read-only now: a standby, or default_transaction_read_only")


def is_pooled(engine: Engine) -> bool:
    """Whether a pooler stands before PostgreSQL: the session that works is not the one that was given at the start.

    Raises:
        HistoryUnreachable, HistoryRefused: as of `check_writable`.
    """
    if engine.dialect.name == "sqlite":
        return False
    try:
        with engine.connect() as connection:
            driver: Any = connection.connection.dbapi_connection  # of psycopg, which may be missing
            return driver.info.backend_pid != connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    except SQLAlchemyError as error:
        raise failure_of(error, engine.url) from error


def nothing_at(path: object, what: str = "database") -> str:
    """Return the message for a SQLite file that does not exist."""
    return f"there is no {what} at {path} yet: a worker creates it, or `worker migrate`"


def schema_revision(connection: Connection) -> str | None:
    """Return the migration of the database; None if it has no tables of the history."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()


def check_schema(connection: Connection, *, may_be_missing: bool = False) -> str | None:
    """Return the schema. Check that it is that of this release; with `may_be_missing`, it may be None.

    Raises:
        HistoryMissing, SchemaTooOld, SchemaTooNew: it is not; the message states what to do.
    """
    revision = schema_revision(connection)
    if revision is None:
        if may_be_missing:
            return None
        raise HistoryMissing("the database has no history yet; run `worker migrate` with this --database-url")
    if revision < SCHEMA_REVISION:
        raise SchemaTooOld(
            f"the history has schema {revision} of a development version, which cannot be migrated to"
            f" {SCHEMA_REVISION}: use an empty database"
        )
    if revision > SCHEMA_REVISION:
        raise SchemaTooNew(f"the history has schema {revision}; this release knows {SCHEMA_REVISION}: update it")
    return revision


def _open_postgres(url: URL, patience_s: float | None) -> Engine:
    engine = sa.create_engine(
        url,
        pool_pre_ping=True,
        pool_recycle=1800,
        pool_timeout=30 if patience_s is None else patience_s,
        connect_args=_connect_args(url, patience_s),
        json_serializer=compact_json,
    )
    if patience_s is not None:
        limit_ms = ceil(patience_s) * 1000

        def limit(connection: Connection) -> None:
            # In each transaction: a pooler may give the next one another session, and this session to another client.
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = {limit_ms}")

        listen(engine, "begin", limit)
    return engine


def _connect_args(url: URL, patience_s: float | None) -> Mapping[str, Any]:  # Any: texts and numbers
    """Return the driver's arguments. It prepares no statements: those belong to a session, which a pooler replaces."""
    given = {"application_name": "sluice", "connect_timeout": 10} | url.query
    ours: dict[str, Any] = {"application_name": given["application_name"], "prepare_threshold": None}
    connect_s = int(str(given["connect_timeout"]))
    if patience_s is None:
        return ours | {"connect_timeout": connect_s}
    whole_s = ceil(patience_s)
    return ours | {
        "connect_timeout": min(connect_s, whole_s),
        "tcp_user_timeout": whole_s * 1000,
        "keepalives_idle": whole_s,
        "keepalives_interval": 1,
        "keepalives_count": 3,
    }


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
