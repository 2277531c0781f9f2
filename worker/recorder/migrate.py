"""Migrate the history's tables up or down. Knows no Redis.

A SQLite file belongs to one program, so workers migrate it at startup. PostgreSQL is shared, so only `worker migrate`
migrates it.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import SetColumnComment

from sluice import migrations
from sluice.history.database import (
    HistoryError,
    HistoryUnreachable,
    check_schema,
    failure_of,
    opened_database,
    schema_revision,
)
from sluice.history.tables import SCHEMA_REVISION, metadata
from sluice.history.views import views
from sluice.protocol.redis.backoff import Backoff
from sluice.worker.connection.outage import FIRST_RETRY_S, Outage
from sluice.worker.errors import ExitCode
from sluice.worker.log import Log

# A number that all releases share, so that two migrations of one PostgreSQL database cannot run at once.
_POSTGRES_LOCK = 0x51_1C_E0

LONGEST_WAIT_S = 2.0
"""Between two tries of `worker migrate`."""


def prepare(engine: Engine) -> None:
    """Prepare a history at a worker's start: migrate SQLite, check PostgreSQL.

    Raises:
        HistoryMissing: PostgreSQL must be migrated with `worker migrate` first.
        SchemaTooOld: no release had the database's schema.
        SchemaTooNew: a newer release has migrated the database.
        HistoryRefused: the database does not exist, refuses this user, or cannot be written.
        HistoryUnreachable: the database does not answer.
    """
    if engine.dialect.name == "sqlite":
        migrate(engine)
        return
    with _reached(engine), engine.connect() as connection:
        check_schema(connection)


def prepare_at(url: str) -> None:
    """Prepare the history at a URL.

    Raises:
        HistoryError: as `prepare`.
    """
    with opened_database(url, is_writer=True) as engine:
        prepare(engine)


def wait_for_history(
    check: Callable[[], None],
    log: Log,
    stopping: threading.Event,
    *,
    retried: type[HistoryError] = HistoryUnreachable,
) -> None:
    """Repeat a check of the history until it passes or `stopping` is set.

    Raises:
        HistoryError: of another kind than `retried`.
    """
    outage = Outage("history database", log)
    while not stopping.is_set():
        try:
            check()
        except retried as error:
            stopping.wait(outage.failed(error))
        else:
            outage.recovered()
            return


def migrate(engine: Engine, revision: str = SCHEMA_REVISION) -> tuple[str | None, str | None]:
    """Migrate to `revision` (`base` for no tables) in one transaction. Return the revisions (before, after).

    Raises:
        SchemaTooOld, SchemaTooNew: this release does not know the database's revision.
        HistoryRefused: the database does not exist, refuses this user, or cannot be written.
        HistoryUnreachable: the database does not answer.
    """
    with _reached(engine), engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_POSTGRES_LOCK})")
        before = check_schema(connection, may_be_missing=True)
        if before != revision:
            _move(connection, revision)
        if revision == SCHEMA_REVISION and connection.dialect.name == "postgresql":
            _comment(connection)
        return before, schema_revision(connection)


@contextmanager
def _reached(engine: Engine) -> Generator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        raise failure_of(error, engine.url) from error


def _move(connection: Connection, revision: str) -> None:
    # Imported here so that a recorder starts sooner with a history that is up to date.
    from alembic import command
    from alembic.config import Config

    # Without a file, so that an installed wheel works too.
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    step: Callable[[Config, str], None] = command.downgrade if revision == "base" else command.upgrade
    step(config, revision)


def _comment(connection: Connection) -> None:
    """Store the descriptions of tables, views and columns as comments in the database (`\\d+ jobs`)."""
    for kind, described in (("TABLE", metadata), ("VIEW", views)):
        for table in described.sorted_tables:
            text = (table.comment or "").replace("'", "''")
            connection.exec_driver_sql(f"COMMENT ON {kind} {table.name} IS '{text}'")
            for column in table.columns:
                connection.execute(SetColumnComment(column))


def main(database_url: str, *, wait_s: float = 0.0, say: Callable[[str], None]) -> ExitCode:
    """Run `worker migrate`, and report the result or the error through `say`.

    An unreachable database is retried for `wait_s` seconds: it may be starting.
    """
    try:
        with opened_database(database_url, is_writer=True) as engine:
            before, after = _migrate_patiently(engine, wait_s, say)
    except HistoryUnreachable as error:
        say(str(error))
        return ExitCode.NOT_READY
    except HistoryError as error:
        say(str(error))
        return ExitCode.MISUSED
    say(f"The history is at schema {after or 'none'}" + (f", was at {before or 'none'}." if before != after else "."))
    return ExitCode.DONE


def _migrate_patiently(engine: Engine, wait_s: float, say: Callable[[str], None]) -> tuple[str | None, str | None]:
    until_s, backoff, has_said = time.monotonic() + wait_s, Backoff(FIRST_RETRY_S, LONGEST_WAIT_S), False
    while True:
        try:
            return migrate(engine)
        except HistoryUnreachable as error:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise
            if not has_said:
                say(f"{error}; waiting for it, up to {wait_s:g} s")
                has_said = True
            time.sleep(min(left_s, backoff.next_delay_s()))
