"""The audit log of changes made on the page, and of limits and schedules changed over HTTP.

An entry has caller, action, target, time and outcome.
"""

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
"""Most bytes of a target; an index entry of PostgreSQL has at most 2,704."""

ROWS_AT_ONCE = 500
MAX_REFUSALS = 10
"""Most failed sign-ins that a gateway records in a minute, because anyone may send them."""

MINUTE_S = 60.0
LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Entry:
    """One action in progress. Changes when its outcome is known."""

    outcome: str = "done"
    outcomes: dict[str, str] = field(default_factory=dict[str, str])
    """Outcomes of targets that differ from `outcome`."""


class AuditLog:
    """The log, in SQL: one row for each target of an action. Changes: it counts failed sign-ins."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._minute_s, self._num_refusals = float("-inf"), 0

    @asynccontextmanager
    async def action(
        self, caller: Caller, action: str, targets: str | Sequence[str], queue: str | None = None
    ) -> AsyncGenerator[Entry]:
        """Record an action before the body performs it, and afterwards its outcome or error.

        If only the outcome cannot be recorded, the action still succeeds, and the gateway's log has the outcome.

        Raises:
            HistoryUnavailable: the action cannot be recorded, so it is not performed.
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
        """Record a failed sign-in, up to `MAX_REFUSALS` a minute. A failure to do so is only logged."""
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
                    is_in_slice = audit_log.c.id.in_(row_ids[at : at + ROWS_AT_ONCE])
                    connection.execute(audit_log.update().where(is_in_slice).values(outcome=outcome))


def _facts(caller: Caller) -> Mapping[str, object]:
    """Return the columns with the time and the caller."""
    key_id, tenant = (None, None) if caller.key is None else (caller.key.id, caller.key.tenant)
    return {"at_ms": wall_ms(), "key_id": key_id, "tenant": tenant}


def _short(target: str) -> str:
    return target.replace("\0", "").encode(errors="replace")[:MAX_TARGET_BYTES].decode(errors="ignore")
