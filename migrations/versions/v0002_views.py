"""The views: hourly percentiles and goodput, the times of a job, its timeline, the progress of a batch."""

from alembic import op

revision = "0002"
down_revision = "0001"

METRICS = ("queue_s", "ttft_s", "tpot_s", "itl_p50_s", "itl_p99_s", "e2e_s")
PERCENTILES = (50, 90, 95, 99)


def upgrade() -> None:
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    for name, sql in views(is_sqlite=is_sqlite).items():
        op.execute(f"CREATE VIEW {name} AS {sql}")
    op.execute(
        "INSERT INTO goodput_limits (name, ttft_s, tpot_s, e2e_s)"
        " VALUES ('chat', 1.0, 0.1, NULL), ('background', NULL, NULL, 3600.0)"
    )


def downgrade() -> None:
    for name in reversed(list(views(is_sqlite=True))):
        op.execute(f"DROP VIEW {name}")
    op.execute("DELETE FROM goodput_limits")


def views(*, is_sqlite: bool) -> dict[str, str]:
    return {
        "hourly_latency": hourly_latency(),
        "hourly_goodput": _hourly_goodput(),
        "job_times": _job_times(is_sqlite=is_sqlite),
        "timeline": timeline(is_sqlite=is_sqlite),
        "batch_progress": _batch_progress(),
    }


def hourly_latency() -> str:
    """Return percentiles by window functions, which both databases have.

    With n values in order, counted from 0, percentile p lies at position p * (n - 1); the value at i weighs max(0, 1 -
    |i - position|): linear interpolation between the two neighbours.
    """
    samples = " UNION ALL ".join(
        f"SELECT finished_hour_ms AS hour_ms, queue, '{metric}' AS metric, {metric} AS value"
        f" FROM jobs WHERE state = 'done' AND {metric} IS NOT NULL"
        for metric in METRICS
    )
    ranked = (
        "SELECT hour_ms, queue, metric, value,"
        " row_number() OVER (PARTITION BY hour_ms, queue, metric ORDER BY value) - 1 AS i,"
        " count(*) OVER (PARTITION BY hour_ms, queue, metric) - 1 AS last"
        f" FROM ({samples}) AS samples"
    )
    percentiles = ", ".join(f"{percentile(percent)} AS p{percent}_s" for percent in PERCENTILES)
    return (
        f"SELECT hour_ms, queue, metric, count(*) AS jobs, avg(value) AS mean_s, {percentiles}, max(value) AS max_s"
        f" FROM ({ranked}) AS ranked GROUP BY hour_ms, queue, metric"
    )


def percentile(percent: int) -> str:
    distance = f"abs(i - {percent / 100} * last)"
    return f"sum(CASE WHEN {distance} < 1 THEN value * (1 - {distance}) ELSE 0.0 END)"


def _hourly_goodput() -> str:
    good = (
        "jobs.state = 'done'"
        " AND (goodput_limits.ttft_s IS NULL OR jobs.ttft_s <= goodput_limits.ttft_s)"
        " AND (goodput_limits.tpot_s IS NULL OR jobs.tpot_s IS NULL OR jobs.tpot_s <= goodput_limits.tpot_s)"
        " AND (goodput_limits.e2e_s IS NULL OR jobs.e2e_s <= goodput_limits.e2e_s)"
    )
    judged = (
        "SELECT goodput_limits.name AS limits, finished_hour_ms AS hour_ms, queue, output_tokens,"
        f" CASE WHEN {good} THEN 1 ELSE 0 END AS good"
        " FROM jobs CROSS JOIN goodput_limits WHERE jobs.state IN ('done', 'failed')"
    )
    return (
        "SELECT limits, hour_ms, queue, count(*) AS jobs, sum(good) AS good_jobs,"
        " CAST(sum(good) AS DOUBLE PRECISION) / count(*) AS goodput,"
        " CAST(sum(good) AS DOUBLE PRECISION) / 3600 AS good_jobs_per_s,"
        " CAST(sum(good * coalesce(output_tokens, 0)) AS DOUBLE PRECISION) / 3600 AS good_tokens_per_s"
        f" FROM ({judged}) AS judged GROUP BY limits, hour_ms, queue"
    )


def iso(ms: str, *, is_sqlite: bool) -> str:
    """Return milliseconds as UTC text, the same on both databases."""
    if is_sqlite:
        return f"strftime('%Y-%m-%dT%H:%M:%fZ', {ms} / 1000.0, 'unixepoch')"
    return f"""to_char(to_timestamp({ms} / 1000.0) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""


def _job_times(*, is_sqlite: bool) -> str:
    moments = ("submitted", "pulled", "scheduled", "first_token", "finished")
    columns = ", ".join(f"{iso(f'{moment}_ms', is_sqlite=is_sqlite)} AS {moment}_at" for moment in moments)
    return f"SELECT id, queue, tenant, state, {columns} FROM jobs"


def timeline(*, is_sqlite: bool, has_submissions: bool = False) -> str:
    submitted = "submitted_ms, " if has_submissions else ""
    of_jobs = " UNION ALL ".join(
        f"SELECT id AS job_id, {submitted}{column} AS at_ms, {event} AS event, CAST(NULL AS BIGINT) AS epoch,"
        f" {detail} AS detail FROM jobs WHERE {column} IS NOT NULL"
        for column, event, detail in (
            ("submitted_ms", "'submitted'", "batch"),
            ("scheduled_ms", "'scheduled'", "CAST(NULL AS TEXT)"),
            ("first_token_ms", "'first_token'", "CAST(NULL AS TEXT)"),
            ("finished_ms", "state", "coalesce(error, reason)"),
        )
    )
    of_attempts = (
        f"SELECT job_id, {submitted}started_ms AS at_ms, 'pulled' AS event, epoch, incarnation AS detail"
        " FROM attempts WHERE started_ms IS NOT NULL"
        f" UNION ALL SELECT job_id, {submitted}ended_ms AS at_ms, 'returned' AS event, epoch, why AS detail"
        " FROM attempts WHERE outcome = 'returned'"
    )
    return (
        f"SELECT job_id, {submitted}at_ms, {iso('at_ms', is_sqlite=is_sqlite)} AS at, event, epoch, detail"
        f" FROM ({of_jobs} UNION ALL {of_attempts}) AS moments"
    )


def _batch_progress() -> str:
    states = ("queued", "running", "done", "failed", "cancelled", "expired")
    counters = ", ".join(f"sum(CASE WHEN state = '{state}' THEN 1 ELSE 0 END) AS {state}" for state in states)
    return (
        f"SELECT queue, batch AS id, count(*) AS jobs, {counters},"
        " CAST(sum(prompt_tokens) AS BIGINT) AS prompt_tokens,"
        " CAST(sum(output_tokens) AS BIGINT) AS output_tokens, min(submitted_ms) AS first_submitted_ms,"
        " max(finished_ms) AS last_finished_ms FROM jobs WHERE batch IS NOT NULL GROUP BY queue, batch"
    )
