"""Hourly percentiles from the few rows next to each percentile, instead of all of the hour."""

from alembic import op

from sluice.migrations.versions.v0002_views import METRICS, PERCENTILES, percentile
from sluice.migrations.versions.v0004_hours import GROUP, hourly_latency_by_windows, replace_hourly_latency

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    replace_hourly_latency(hourly_latency_by_few_rows())


def downgrade() -> None:
    replace_hourly_latency(hourly_latency_by_windows())


def hourly_latency_by_few_rows() -> str:
    """Create `hourly_latency` with a single window over all values, and sums over the rows next to a percentile.

    One frame for all three functions, so that SQLite sorts and passes once.
    """
    is_done = "likely(state = 'done')" if op.get_bind().dialect.name == "sqlite" else "state = 'done'"
    samples = " UNION ALL ".join(
        f"SELECT finished_hour_ms AS hour_ms, queue, '{metric}' AS metric, {metric} AS value"
        f" FROM jobs WHERE {is_done} AND {metric} IS NOT NULL"
        for metric in METRICS
    )
    ranked = (
        "SELECT hour_ms, queue, metric, value,"
        " row_number() OVER ordered - 1 AS i, count(*) OVER ordered - 1 AS last, avg(value) OVER ordered AS mean_s"
        f" FROM ({samples}) AS samples"
        f" WINDOW ordered AS ({GROUP} ORDER BY value ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)"
    )
    wanted = " OR ".join(("i = 0", "i = last", *(f"abs(i - {percent / 100} * last) < 1" for percent in PERCENTILES)))
    few = f"SELECT hour_ms, queue, metric, value, i, last, mean_s FROM ({ranked}) AS ranked WHERE {wanted}"
    percentiles = ", ".join(f"{percentile(percent)} OVER hours AS p{percent}_s" for percent in PERCENTILES)
    summed = (
        f"SELECT hour_ms, queue, metric, i, last + 1 AS jobs, mean_s, {percentiles},"
        f" max(value) OVER hours AS max_s FROM ({few}) AS few WINDOW hours AS ({GROUP})"
    )
    columns = ", ".join(f"p{percent}_s" for percent in PERCENTILES)
    return f"SELECT hour_ms, queue, metric, jobs, mean_s, {columns}, max_s FROM ({summed}) AS summed WHERE i = 0"
