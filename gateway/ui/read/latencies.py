"""Latencies and counts of the last jobs, from the history. Methods block."""

import time
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from sluice.gateway.tables.database import Database
from sluice.gateway.ui.read.overview import Latency
from sluice.history.percentiles import percentile
from sluice.history.tables import jobs

RECENT_S = 900
MAX_JOBS = 2000
"""Most jobs of which percentiles are computed, the last ones, so that a page costs the same at any rate."""

DAY_S = 86_400


def ttft_by_queue(database: Database, queues: Sequence[str]) -> Mapping[str, Latency]:
    """Return the time to first token in each queue, over the last 15 minutes."""
    with database.reading() as connection:
        return {name: _ttft(connection, jobs.c.queue == name) for name in queues}


def ttft_of_tenant(database: Database, tenant: str) -> Latency:
    """Return the time to first token of a tenant's jobs, over the last 15 minutes."""
    with database.reading() as connection:
        return _ttft(connection, jobs.c.tenant == tenant)


def counts_of_tenant(database: Database, tenant: str, queues: Sequence[str]) -> Mapping[str, int]:
    """Return the number of a tenant's jobs, submitted in the last day, by state."""
    since_ms = round((time.time() - DAY_S) * 1000)
    conditions = (jobs.c.tenant == tenant, jobs.c.submitted_ms >= since_ms, jobs.c.queue.in_(queues))
    query = sa.select(jobs.c.state, sa.func.count()).where(*conditions).group_by(jobs.c.state)
    with database.reading() as connection:
        return {str(state): int(number) for state, number in connection.execute(query)}


def _ttft(connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> Latency:
    since_ms = round((time.time() - RECENT_S) * 1000)
    is_known = (jobs.c.submitted_ms >= since_ms, jobs.c.ttft_s.is_not(None), jobs.c.state == "done")
    query = sa.select(jobs.c.ttft_s).where(*conditions, *is_known).order_by(jobs.c.submitted_ms.desc()).limit(MAX_JOBS)
    ordered = sorted(connection.execute(query).scalars())
    if not ordered:
        return Latency()
    return Latency(p50_s=percentile(ordered, 50), p95_s=percentile(ordered, 95))
