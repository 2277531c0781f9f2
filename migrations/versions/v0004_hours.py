"""Indexes for two pages of a large history: the percentiles of an hour, and the newest jobs of a batch."""

from alembic import op

from sluice.migrations.versions.v0001_tables import HAS_BATCH
from sluice.migrations.versions.v0002_views import METRICS, PERCENTILES, hourly_latency, percentile

revision = "0004"
down_revision = "0003"

GROUP = "PARTITION BY hour_ms, queue, metric"


def upgrade() -> None:
    op.create_index("jobs_by_queue_and_hour", "jobs", ["queue", "finished_hour_ms"])
    replace_hourly_latency(hourly_latency_by_windows())
    _index_batches(["queue", "batch", "submitted_ms", "state"])


def downgrade() -> None:
    op.drop_index("jobs_by_queue_and_hour")
    replace_hourly_latency(hourly_latency())
    _index_batches(["queue", "batch", "state"])


def _index_batches(columns: list[str]) -> None:
    op.drop_index("jobs_by_batch")
    op.create_index("jobs_by_batch", "jobs", columns, sqlite_where=HAS_BATCH, postgresql_where=HAS_BATCH)


def replace_hourly_latency(sql: str) -> None:
    op.execute("DROP VIEW hourly_latency")
    op.execute(f"CREATE VIEW hourly_latency AS {sql}")


def hourly_latency_by_windows() -> str:
    """Create `hourly_latency` without GROUP BY, so that a condition on a window's partition reaches the table.

    SQLite pushes a condition through subqueries with windows, and through a UNION ALL without any, but not through an
    aggregate over windows. `likely` stops it from using the state index for nearly all jobs.
    """
    is_done = "likely(state = 'done')" if op.get_bind().dialect.name == "sqlite" else "state = 'done'"
    samples = " UNION ALL ".join(
        f"SELECT finished_hour_ms AS hour_ms, queue, '{metric}' AS metric, {metric} AS value"
        f" FROM jobs WHERE {is_done} AND {metric} IS NOT NULL"
        for metric in METRICS
    )
    ranked = (
        f"SELECT hour_ms, queue, metric, value, row_number() OVER ({GROUP} ORDER BY value) - 1 AS i,"
        f" count(*) OVER ({GROUP}) - 1 AS last FROM ({samples}) AS samples"
    )
    percentiles = ", ".join(f"{percentile(percent)} OVER hours AS p{percent}_s" for percent in PERCENTILES)
    summed = (
        f"SELECT hour_ms, queue, metric, i, last + 1 AS jobs, avg(value) OVER hours AS mean_s, {percentiles},"
        f" max(value) OVER hours AS max_s FROM ({ranked}) AS ranked WINDOW hours AS ({GROUP})"
    )
    columns = ", ".join(f"p{percent}_s" for percent in PERCENTILES)
    return f"SELECT hour_ms, queue, metric, jobs, mean_s, {columns}, max_s FROM ({summed}) AS summed WHERE i = 0"
