"""Bring the history's tables to this release, or back. Knows no Redis.

SQLite is one program's file and migrates itself when a worker starts. PostgreSQL is shared, so it is migrated when a
person says so: `worker migrate`.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import SetColumnComment

import migrations
from producer.contract.database import (
    HistoryError,
    HistoryMissing,
    HistoryUnreachable,
    SchemaTooNew,
    SchemaTooOld,
    check_schema,
    open_database,
    schema_revision,
    why,
)
from producer.contract.tables import SCHEMA_REVISION, metadata
from worker.errors import ExitCode

__all__ = [
    "HistoryError",
    "HistoryMissing",
    "HistoryUnreachable",
    "SchemaTooNew",
    "SchemaTooOld",
    "main",
    "migrate",
    "prepare",
]

# Any number that all releases share: two migrations of one PostgreSQL database must not run at once.
_POSTGRES_LOCK = 0x51_1C_E0


def prepare(engine: Engine) -> None:
    """Make a history ready for this release at a worker's start: migrate SQLite, check PostgreSQL.

    Raises:
        HistoryMissing, SchemaTooOld: PostgreSQL must be migrated by a person first.
        SchemaTooNew: a newer release has migrated the database.
        HistoryUnreachable: the database does not answer.
    """
    if engine.dialect.name == "sqlite":
        migrate(engine)
        return
    with _reached(), engine.connect() as connection:
        check_schema(connection)


def migrate(engine: Engine, revision: str = SCHEMA_REVISION) -> tuple[str | None, str | None]:
    """Bring the tables to `revision` (`base`: no tables), all steps in one transaction; give (before, after).

    Raises:
        SchemaTooNew: the database is at a revision that this release does not know.
        HistoryUnreachable: the database does not answer.
    """
    with _reached(), engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_POSTGRES_LOCK})")
        before = schema_revision(connection)
        if before is not None and before > SCHEMA_REVISION:
            raise SchemaTooNew(f"the history has schema {before}; this release knows {SCHEMA_REVISION}: update it")
        _move(connection, before, revision)
        if revision == SCHEMA_REVISION and connection.dialect.name == "postgresql":
            _comment(connection)
        return before, schema_revision(connection)


@contextmanager
def _reached() -> Generator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        raise HistoryUnreachable(f"the history's database does not do as asked: {why(error)}") from error


def _move(connection: Connection, before: str | None, revision: str) -> None:
    if before == revision:
        return
    is_down = revision == "base" or (before is not None and revision < before)
    step: Callable[[Config, str], None] = command.downgrade if is_down else command.upgrade
    step(_config(connection), revision)


def _comment(connection: Connection) -> None:
    """Let the database itself say what its columns mean (`\\d+ jobs`)."""
    for table in metadata.sorted_tables:
        for column in table.columns:
            if column.comment:
                connection.execute(SetColumnComment(column))


def _config(connection: Connection) -> Config:
    """Alembic's settings without a file, so that an installed wheel works too."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def main(database_url: str, *, revision: str = SCHEMA_REVISION, say: Callable[[str], None]) -> ExitCode:
    """Run `worker migrate`, and say in a sentence what it did or why it could not."""
    try:
        engine = open_database(database_url, is_writer=True)
        try:
            before, after = migrate(engine, revision)
        finally:
            engine.dispose()
    except HistoryUnreachable as error:
        say(str(error))
        return ExitCode.NOT_READY
    except HistoryError as error:
        say(str(error))
        return ExitCode.MISUSED
    say(f"The history is at schema {after or 'none'}" + (f", was at {before or 'none'}." if before != after else "."))
    return ExitCode.DONE
