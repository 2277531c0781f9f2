"""The gateway's tables, in the database of the history."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from sluice.gateway.faults import TablesMissing
from sluice.history.database import READ_ONLY, HistoryError, check_schema, nothing_at, open_database, why
from sluice.producer.errors import HistoryUnavailable


class Database:
    """A writable database. Thread-safe. Leaving the context closes its connections.

    Args:
        url: `sqlite:///FILE` or `postgresql://…`.
        patience_s: As of `open_database`.

    Raises:
        HistoryUnavailable: the URL names no supported database.
    """

    def __init__(self, url: str, *, patience_s: float | None = None) -> None:
        with _explained():
            self._engine = open_database(url, is_writer=True, patience_s=patience_s)
        self._reading = self._engine.execution_options(**{READ_ONLY: True})
        self._is_checked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._engine.dispose()

    def check(self) -> None:
        """Check that the gateway's tables can be read.

        Raises:
            HistoryUnavailable: they cannot be read now.
        """
        with self.reading():
            return

    @contextmanager
    def transaction(self) -> Generator[sa.Connection]:
        """Begin a transaction; it is committed unless the body raises.

        Raises:
            HistoryUnavailable: the database cannot be used now.
        """
        with self._begun(self._engine) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Generator[sa.Connection]:
        """Begin a transaction that only reads: on SQLite it does not wait for writers.

        Raises:
            HistoryUnavailable: the database cannot be used now.
        """
        with self._begun(self._reading) as connection:
            yield connection

    @contextmanager
    def _begun(self, engine: sa.Engine) -> Generator[sa.Connection]:
        path = self._engine.url.database
        if self._engine.dialect.name == "sqlite" and not Path(path or "").exists():  # SQLite would create it
            raise TablesMissing(nothing_at(path))
        with _explained(), engine.begin() as connection:
            if not self._is_checked:
                check_schema(connection)
                self._is_checked = True
            yield connection


def lock_tenant(connection: sa.Connection, tenant: str) -> None:
    """Lock a tenant until the transaction ends, so that its stored bytes do not change after they were counted.

    On SQLite, only one transaction writes at a time anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(f"sluice {tenant}", 0))))


@contextmanager
def _explained() -> Generator[None]:
    try:
        yield
    except HistoryError as error:
        raise TablesMissing(f"{error}. Give --database-url or SLUICE_DATABASE_URL.") from error
    except SQLAlchemyError as error:
        raise HistoryUnavailable(f"the database does not answer: {why(error)}") from error
