"""The log of changes made on the page: who, what, when, and how it ended."""

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from time import monotonic

from sluice.gateway.access import Caller
from sluice.gateway.errors import HttpError
from sluice.gateway.tables.database import Database
from sluice.gateway.threads import SQL
from sluice.history.tables import audit_log
from sluice.producer.errors import HistoryUnavailable
from sluice.protocol.clock import wall_ms

MAX_TARGET_BYTES = 1000
"""An index of PostgreSQL takes at most 2,704."""

ROWS_AT_ONCE = 500
MAX_REFUSALS = 10
"""Failed sign-ins that a gateway writes down in a minute: everybody may send them."""

MINUTE_S = 60.0
LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Entry:
    """One change that is being made. Changes: its outcome is set when it is known."""

    outcome: str = "done"
    outcomes: dict[str, str] = field(default_factory=dict[str, str])
    """Of targets that ended otherwise."""


class AuditLog:
    """The log, in SQL: a row for each target of a change. Changes: it counts failed sign-ins."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._minute_s, self._num_refusals = float("-inf"), 0

    @asynccontextmanager
    async def action(
        self, caller: Caller, action: str, targets: str | Sequence[str], queue: str | None = None
    ) -> AsyncGenerator[Entry]:
        """Write that a change begins, before the body makes it; then its outcome, or the error that it ended with.

        A change that was made is answered also if its outcome cannot be written: then the gateway's log has it.

        Raises:
            HistoryUnavailable: the change cannot be written down, so it is not made.
        """
        entry, named = Entry(), (targets,) if isinstance(targets, str) else targets
        ids = {target: token_hex(12) for target in named}
        common = {**_facts(caller), "action": action, "queue": queue}
        await SQL.run(self._add, [{**common, "id": row_id, "target": _short(name)} for name, row_id in ids.items()])
        try:
            yield entry
        except BaseException as error:
            entry.outcome = (error.code or "refused") if isinstance(error, HttpError) else type(error).__name__
            raise
        finally:
            try:
                await SQL.run(self._finish, ids, entry)
            except HistoryUnavailable as error:
                facts = (action, caller.facts, sorted(ids)[:ROWS_AT_ONCE], entry.outcome)
                LOG.error("The outcome of a change is not in the audit log (%s): %s %s %s %s", error, *facts)  # noqa: TRY400  # expected

    async def refused_sign_in(self, address: str, key_id: str | None) -> None:
        """Write down a failed sign-in, if there were not many in this minute. A failure to do so is only logged."""
        if monotonic() - self._minute_s >= MINUTE_S:
            self._minute_s, self._num_refusals = monotonic(), 0
        self._num_refusals += 1
        if self._num_refusals > MAX_REFUSALS:
            return
        outcome = "refused" if self._num_refusals < MAX_REFUSALS else "refused; more in this minute are not listed"
        own = {"key_id": key_id, "action": "sign_in", "target": _short(address), "outcome": outcome}
        try:
            await SQL.run(self._add, [{**_facts(Caller()), **own, "id": token_hex(12)}])
        except HistoryUnavailable as error:
            LOG.warning("A failed sign-in from %s is not in the audit log: %s", address, error)

    def _add(self, rows: Sequence[Mapping[str, object]]) -> None:
        with self._database.transaction() as connection:
            connection.execute(audit_log.insert(), rows)

    def _finish(self, ids: Mapping[str, str], entry: Entry) -> None:
        by_outcome: dict[str, list[str]] = {}
        for target, row_id in ids.items():
            by_outcome.setdefault(entry.outcomes.get(target, entry.outcome), []).append(row_id)
        with self._database.transaction() as connection:
            for outcome, row_ids in by_outcome.items():
                for at in range(0, len(row_ids), ROWS_AT_ONCE):
                    some = audit_log.c.id.in_(row_ids[at : at + ROWS_AT_ONCE])
                    connection.execute(audit_log.update().where(some).values(outcome=outcome))


def _facts(caller: Caller) -> Mapping[str, object]:
    """Return the time and the visitor."""
    key_id, tenant = (None, None) if caller.key is None else (caller.key.id, caller.key.tenant)
    return {"at_ms": wall_ms(), "key_id": key_id, "tenant": tenant}


def _short(target: str) -> str:
    return target.replace("\0", "").encode(errors="replace")[:MAX_TARGET_BYTES].decode(errors="ignore")
