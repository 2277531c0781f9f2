"""The table of API keys, in the database of the history."""

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from sluice.gateway.api_keys.key import ApiKey
from sluice.history.database import (
    HistoryError,
    HistoryMissing,
    SchemaTooOld,
    check_schema,
    nothing_at,
    open_database,
    why,
)
from sluice.history.tables import api_keys
from sluice.producer.errors import HistoryUnavailable, ProducerError

LOG = logging.getLogger(__name__)


class NoKeyTable(HistoryUnavailable):
    """The database has no table of keys yet."""


class KeyStore:
    """The API keys in a database. Thread-safe. Use it in a `with` statement.

    Args:
        url: `sqlite:///FILE` or `postgresql://…`.
        is_writer: Whether commits must reach the disk.
        patience_s: As of `open_database`.

    Raises:
        HistoryUnavailable: the URL names no supported database. Every method raises it while the database cannot be
            used, and `NoKeyTable` while it has no table of keys.
    """

    def __init__(self, url: str, *, is_writer: bool = False, patience_s: float | None = None) -> None:
        with _explained():
            self._engine = open_database(url, is_writer=is_writer, patience_s=patience_s)
        self._is_checked = False
        self._unreadable: frozenset[str] = frozenset()
        self._known: dict[str, tuple[Mapping[str, Any], ApiKey]] = {}
        """Rows and the keys made of them, by id, so that only a row that has changed is validated again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.dispose()

    @property
    def has_unreadable(self) -> bool:
        """Whether the last call of `keys` skipped an invalid row."""
        return bool(self._unreadable)

    def add(self, key: ApiKey) -> None:
        """Add a new key."""
        with self._connection() as connection:
            connection.execute(api_keys.insert().values(**_row(key)))

    def keys(self, *, tenant: str | None = None) -> list[ApiKey]:
        """Return all keys, including revoked and expired ones, oldest first.

        An invalid row is skipped, and logged the first time.
        """
        query = sa.select(*api_keys.columns).order_by(api_keys.c.created_ms, api_keys.c.id)
        if tenant is not None:
            query = query.where(api_keys.c.tenant == tenant)
        with self._connection() as connection:
            rows = [dict(row) for row in connection.execute(query).mappings()]
        return self._keys_in(rows)

    def revoke(self, key_ids: Sequence[str], now_ms: int) -> set[str]:
        """Revoke keys; return the ids that exist. A key that is already revoked keeps its time."""
        has_id = api_keys.c.id.in_(key_ids)
        with self._connection() as connection:
            connection.execute(
                api_keys.update().where(has_id, api_keys.c.revoked_ms.is_(None)).values(revoked_ms=now_ms)
            )
            return {*connection.execute(sa.select(api_keys.c.id).where(has_id)).scalars()}

    def note_use(self, times_ms: Mapping[str, int]) -> None:
        """Record when keys, by id, were last used."""
        changes = [{"key": key_id, "at": at_ms} for key_id, at_ms in times_ms.items()]
        is_later = sa.func.coalesce(api_keys.c.last_used_ms, 0) < sa.bindparam("at")
        update = api_keys.update().where(api_keys.c.id == sa.bindparam("key"), is_later)
        with self._connection() as connection:
            connection.execute(update.values(last_used_ms=sa.bindparam("at")), changes)

    def _keys_in(self, rows: Sequence[Mapping[str, Any]]) -> list[ApiKey]:  # Any: as in `_key`
        keys: list[ApiKey] = []
        unreadable: set[str] = set()
        by_id: dict[str, tuple[Mapping[str, Any], ApiKey]] = {}
        for row in rows:
            try:
                before = self._known.get(str(row["id"]))
                key = before[1] if before is not None and before[0] == row else _key(row)
                keys.append(key)
                by_id[key.id] = (row, key)
            except (ProducerError, TypeError, ValueError) as error:
                key_id = str(row["id"])
                unreadable.add(key_id)
                if key_id not in self._unreadable:
                    LOG.warning("An API key in the database is not valid and is ignored: key %s: %s", key_id, error)
        self._unreadable, self._known = frozenset(unreadable), by_id
        return keys

    @contextmanager
    def _connection(self) -> Generator[sa.Connection]:
        path = self._engine.url.database
        if self._engine.dialect.name == "sqlite" and not Path(path or "").exists():  # SQLite would create it
            raise NoKeyTable(nothing_at(path))
        with _explained(), self._engine.begin() as connection:
            if not self._is_checked:
                check_schema(connection)
                self._is_checked = True
            yield connection


def _key(row: Mapping[str, Any]) -> ApiKey:  # Any: a row's values are as its columns say
    values: dict[str, Any] = dict(row)
    values["scopes"] = tuple(scope for scope in str(row["scopes"]).split(",") if scope)
    return ApiKey(**values)


def _row(key: ApiKey) -> dict[str, object]:
    return {**asdict(key), "scopes": ",".join(key.scopes)}


@contextmanager
def _explained() -> Generator[None]:
    try:
        yield
    except (HistoryMissing, SchemaTooOld) as error:
        raise NoKeyTable(f"{error}.") from error
    except HistoryError as error:
        raise HistoryUnavailable(f"{error}. Give --database-url or SLUICE_DATABASE_URL.") from error
    except SQLAlchemyError as error:
        raise HistoryUnavailable(f"the API keys cannot be read: {why(error)}. Check the database URL.") from error
