"""The log of what was changed on the page: who, what, when, and how it ended."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from secrets import token_hex

from sluice.producer.contract.tables import audit_log
from sluice.producer.gateway.access import Caller
from sluice.producer.gateway.errors import HttpError
from sluice.producer.gateway.tables.database import Database
from sluice.producer.gateway.tables.threads import SQL

MAX_TARGET_CHARS = 1000


@dataclass(slots=True, eq=False)
class Entry:
    """One change that is being made. Changes: its outcome is set when it is known."""

    outcome: str = "done"


class AuditLog:
    """The log, in SQL."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @asynccontextmanager
    async def action(self, caller: Caller, action: str, target: str, queue: str | None = None) -> AsyncGenerator[Entry]:
        """Write that a change begins, before the body makes it; then its outcome, or the error that it ended with.

        Raises:
            HistoryUnavailable: the change cannot be written down, so it is not made.
        """
        entry, row_id = Entry(), token_hex(12)
        row: dict[str, object] = {
            "id": row_id,
            "at_ms": round(time.time() * 1000),
            "key_id": None if caller.key is None else caller.key.id,
            "tenant": None if caller.key is None else caller.key.tenant,
            "action": action,
            "queue": queue,
            "target": target[:MAX_TARGET_CHARS],
        }
        await SQL.run(self._add, row)
        try:
            yield entry
        except BaseException as error:
            entry.outcome = (error.code or "refused") if isinstance(error, HttpError) else type(error).__name__
            raise
        finally:
            await SQL.run(self._finish, row_id, entry.outcome)

    def _add(self, row: dict[str, object]) -> None:
        with self._database.transaction() as connection:
            connection.execute(audit_log.insert().values(**row))

    def _finish(self, row_id: str, outcome: str) -> None:
        with self._database.transaction() as connection:
            connection.execute(audit_log.update().where(audit_log.c.id == row_id).values(outcome=outcome))
