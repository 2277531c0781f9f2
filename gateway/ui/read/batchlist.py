"""The list of batches: from the recorder's counters, and for a tenant from counts that are cached here.

Several tenants may use the same name, and the counters do not distinguish their jobs. So a batch is counted by tenant
when its counters have changed, and a page waits only briefly for that.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from sluice.gateway.tables.database import Database
from sluice.gateway.threads import HISTORY
from sluice.gateway.ui.read.batches import LISTED, STATES, BatchLine
from sluice.history.tables import batches, gateway_batches, jobs
from sluice.producer.errors import HistoryUnavailable

SEARCHED = 200
"""Number of newest batches that are searched for a tenant's; its batches of the gateway are always found."""

WAIT_S = 0.08
Key = tuple[str, str]
"""Queue and id of a batch."""

Row = Mapping[Any, Any]  # Any: a row's values are as its columns say
Counts = Mapping[str, Mapping[str, int]]
"""Jobs by tenant and state."""


class BatchList:
    """The newest batches. Changes with each reading: the counts of a batch are cached until its jobs change."""

    def __init__(self, database: Database, queues: Sequence[str]) -> None:
        self._database, self._queues = database, queues
        self._counted: dict[Key, tuple[int | None, Counts]] = {}
        self._counting: asyncio.Task[None] | None = None

    async def get(self, tenant: str | None, wait_s: float = WAIT_S) -> tuple[list[BatchLine], int]:
        """Return the newest batches of a tenant, or of all tenants, and how many are not counted yet.

        Raises:
            HistoryUnavailable: the database does not answer.
        """
        rows, own = await HISTORY.run(_newest, self._database, self._queues, tenant)
        lines, num_left = [_gateway_line(row) for row in own], 0
        others = [row for row in rows if _key(row) not in {(line.queue, line.id) for line in lines}]
        if tenant is None:
            lines += [_line(row, row) for row in others]
        else:
            await self._count(others, wait_s)
            num_left = sum(_key(row) not in self._counted for row in others)
            lines += list(self._of_tenant(others, tenant))
        return sorted(lines, key=lambda line: line.created_ms, reverse=True)[:LISTED], num_left

    def _of_tenant(self, rows: Sequence[Row], tenant: str) -> Iterator[BatchLine]:
        for row in rows:
            _, counts = self._counted.get(_key(row), (None, {}))
            if tenant in counts:
                yield _line(row, counts[tenant])

    async def _count(self, rows: Sequence[Row], wait_s: float) -> None:
        """Count the changed batches, one at a time, the newest first; wait up to `wait_s`."""
        if self._counting is None or self._counting.done():
            self._counting = asyncio.create_task(self._count_all(rows))
        await asyncio.wait((self._counting,), timeout=wait_s)

    async def _count_all(self, rows: Sequence[Row]) -> None:
        refreshed = {_key(row): row["refreshed_ms"] for row in rows}
        self._counted = {key: counts for key, counts in self._counted.items() if key in refreshed}
        for key, refreshed_ms in refreshed.items():
            if key in self._counted and self._counted[key][0] == refreshed_ms:
                continue
            try:
                self._counted[key] = refreshed_ms, await HISTORY.run(_counts, self._database, key)
            except HistoryUnavailable:
                continue  # the batch has too many jobs for one query now; others may not


def _newest(database: Database, queues: Sequence[str], tenant: str | None) -> tuple[list[Row], list[Row]]:
    """Return rows of the newest batches, and those of the gateway's batches with their counters."""
    all_of_them = sa.select(batches).where(batches.c.queue.in_(queues)).order_by(batches.c.created_ms.desc())
    is_same = sa.and_(batches.c.queue == gateway_batches.c.queue, batches.c.id == gateway_batches.c.id)
    counters = [batches.c[state] for state in STATES]
    names = ("queue", "id", "created_ms", "total", "status")
    own = sa.select(*(gateway_batches.c[name] for name in names), *counters).outerjoin(batches, is_same)
    own = own.where(gateway_batches.c.queue.in_(queues)).order_by(gateway_batches.c.created_ms.desc()).limit(LISTED)
    if tenant is not None:
        own = own.where(gateway_batches.c.tenant == tenant)
    with database.reading() as connection:
        rows = connection.execute(all_of_them.limit(LISTED if tenant is None else SEARCHED)).mappings().all()
        return [*rows], [*connection.execute(own).mappings().all()]


def _counts(database: Database, key: Key) -> Counts:
    query = sa.select(jobs.c.tenant, jobs.c.state, sa.func.count()).where(
        jobs.c.queue == key[0], jobs.c.batch == key[1]
    )
    counts: dict[str, dict[str, int]] = {}
    with database.reading() as connection:
        for tenant, state, number in connection.execute(query.group_by(jobs.c.tenant, jobs.c.state)):
            counts.setdefault(str(tenant), {})[str(state)] = int(number)
    return counts


def _key(row: Row) -> Key:
    return str(row["queue"]), str(row["id"])


def _line(row: Row, counts: Row) -> BatchLine:
    return BatchLine(
        queue=str(row["queue"]),
        id=str(row["id"]),
        created_ms=int(row["created_ms"]),
        counts={state: int(counts.get(state) or 0) for state in STATES},
    )


def _gateway_line(row: Row) -> BatchLine:
    return replace(_line(row, row), total=int(row["total"]), status=str(row["status"]))
