"""Batches: their progress, rate and errors, counted from the history. Methods block."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from sluice.gateway.batches.batch import OPEN
from sluice.gateway.tables.database import Database
from sluice.history.tables import gateway_batches, jobs

LISTED = 50
RATE_S = 60
ENDED = ("done", "failed", "cancelled", "expired")
STATES = ("queued", "running", *ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """A batch with its counts."""

    queue: str
    id: str
    created_ms: int
    counts: Mapping[str, int]
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished_ms: int | None = None
    total: int | None = None
    """Lines of the input file of a batch of the gateway; None for other batches, which have only jobs."""

    status: str | None = None
    """Status of a batch of the gateway. The next two are the ids of its files."""

    output_file: str | None = None
    error_file: str | None = None
    recent: int = 0
    """Jobs that ended in the last minute."""

    @property
    def is_open(self) -> bool:
        """Whether the gateway still works on it."""
        return self.status in OPEN

    @property
    def size(self) -> int:
        """Number of jobs that it has, or will have."""
        return max(self.total or 0, sum(self.counts.values()))

    @property
    def ended(self) -> int:
        """Number of jobs that have ended."""
        return sum(self.counts.get(state, 0) for state in ENDED)

    @property
    def share(self) -> float:
        """Fraction of jobs that have ended."""
        return self.ended / self.size if self.size else 0.0

    @property
    def is_over(self) -> bool:
        """Whether all jobs have ended."""
        return self.size > 0 and self.ended >= self.size

    @property
    def rate(self) -> float:
        """Jobs that end a second, over the last minute."""
        return self.recent / min(RATE_S, max(1.0, time.time() - self.created_ms / 1000))

    @property
    def eta_s(self) -> float | None:
        """Estimated time until all jobs have ended at this rate, in seconds; None if no job ends."""
        return (self.size - self.ended) / self.rate if self.rate and not self.is_over else None

    @property
    def mean_eta_s(self) -> float | None:
        """The same estimate at the average rate since the begin."""
        if self.is_over or not self.ended:
            return None
        return (self.size - self.ended) * max(1.0, time.time() - self.created_ms / 1000) / self.ended


def one_batch(database: Database, queue: str, batch_id: str, tenant: str | None) -> BatchLine | None:
    """Return a batch; None if it does not exist, or the tenant has no job in it."""
    own = sa.select(gateway_batches).where(gateway_batches.c.queue == queue, gateway_batches.c.id == batch_id)
    if tenant is not None:
        own = own.where(gateway_batches.c.tenant == tenant)
    first = sa.select(sa.func.min(jobs.c.submitted_ms)).where(*_of(queue, batch_id, tenant))
    with database.reading() as connection:
        row = connection.execute(own).mappings().one_or_none()
        created_ms = row["created_ms"] if row is not None else connection.execute(first).scalar()
        return None if created_ms is None else _line(connection, (queue, batch_id), int(created_ms), row, tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorGroup:
    """Jobs of a batch that ended in the same way."""

    name: str
    jobs: int
    example: str
    column: str
    """The filter of the job list that takes the name: `error`, or `state` if the jobs have no error."""


def errors_of(database: Database, queue: str, batch_id: str, tenant: str | None) -> list[ErrorGroup]:
    """Return each kind of error, the most frequent first."""
    name, has_code = sa.func.coalesce(jobs.c.error_code, jobs.c.state), jobs.c.error_code.is_not(None)
    conditions = (*_of(queue, batch_id, tenant), jobs.c.state.in_(("failed", "expired", "cancelled")))
    example = sa.func.max(sa.func.coalesce(jobs.c.error, jobs.c.reason, ""))
    query = sa.select(name, sa.func.count(), example, has_code).where(*conditions).group_by(name, has_code)
    with database.reading() as connection:
        rows = connection.execute(query.order_by(sa.func.count().desc()).limit(LISTED)).all()
    return [
        ErrorGroup(name=str(name), jobs=int(number), example=str(text), column="error" if has_code else "state")
        for name, number, text, has_code in rows
    ]


def _line(
    connection: sa.Connection,
    key: tuple[str, str],
    created_ms: int,
    row: Mapping[Any, Any] | None,  # Any: a row's values are as its columns say
    tenant: str | None,
) -> BatchLine:
    queue, batch_id = key
    since_ms = round((time.time() - RATE_S) * 1000)
    figures = (
        sa.func.count().label("jobs"),
        sa.func.sum(jobs.c.prompt_tokens).label("prompt_tokens"),
        sa.func.sum(jobs.c.output_tokens).label("output_tokens"),
        sa.func.max(jobs.c.finished_ms).label("finished_ms"),
        sa.func.sum(sa.case((jobs.c.finished_ms >= since_ms, 1), else_=0)).label("recent"),
    )
    query = sa.select(jobs.c.state, *figures).where(*_of(queue, batch_id, tenant)).group_by(jobs.c.state)
    rows = connection.execute(query).mappings().all()
    return BatchLine(
        queue=queue,
        id=batch_id,
        created_ms=created_ms,
        counts={str(part["state"]): int(part["jobs"]) for part in rows},
        prompt_tokens=sum(int(part["prompt_tokens"] or 0) for part in rows),
        output_tokens=sum(int(part["output_tokens"] or 0) for part in rows),
        finished_ms=max((int(part["finished_ms"]) for part in rows if part["finished_ms"] is not None), default=None),
        recent=sum(int(part["recent"] or 0) for part in rows),
        total=None if row is None else int(row["total"]),
        status=None if row is None else str(row["status"]),
        output_file=None if row is None else row["output_file"],
        error_file=None if row is None else row["error_file"],
    )


def _of(queue: str, batch_id: str, tenant: str | None) -> list[sa.ColumnElement[bool]]:
    conditions = [jobs.c.queue == queue, jobs.c.batch == batch_id]
    return conditions if tenant is None else [*conditions, jobs.c.tenant == tenant]


def queues_with_open_batches(database: Database, queues: Sequence[str]) -> set[str]:
    """Return the queues that have open batches of the gateway."""
    columns, is_open = gateway_batches.c, gateway_batches.c.status.in_(OPEN)
    query = sa.select(columns.queue).where(is_open, columns.queue.in_(queues)).distinct()
    with database.reading() as connection:
        return {*connection.execute(query).scalars()}


def tenant_of_batch(database: Database, batch_id: str) -> str | None:
    """Return the tenant of a batch of the gateway; None if it does not exist."""
    with database.reading() as connection:
        query = sa.select(gateway_batches.c.tenant).where(gateway_batches.c.id == batch_id)
        return connection.execute(query).scalar_one_or_none()
