"""The views of the job history: their columns, and the queries behind them. `worker migrate` creates them."""

import sqlalchemy as sa

from sluice.history.tables import Count, Ms, columns_in, jobs

views = sa.MetaData()
"""Declared for reading only: `queries` has their SQL."""

METRICS = columns_in("hourly_latency")
"""The durations of a job whose distribution is shown."""

PERCENTILES = (50, 90, 95, 99)

hourly_latency = sa.Table(
    "hourly_latency",
    views,
    sa.Column("hour_ms", Ms, comment="begin of the hour in which they ended"),
    sa.Column("queue", sa.Text, comment="of the jobs"),
    sa.Column("metric", sa.Text, comment=f"{', '.join(METRICS[:-1])} or {METRICS[-1]}"),
    sa.Column("jobs", Count, comment="done in this hour, with this metric"),
    sa.Column("mean_s", sa.Double, comment="mean"),
    sa.Column("p50_s", sa.Double, comment="median"),
    sa.Column("p90_s", sa.Double, comment="90th percentile"),
    sa.Column("p95_s", sa.Double, comment="95th percentile"),
    sa.Column("p99_s", sa.Double, comment="99th percentile"),
    sa.Column("max_s", sa.Double, comment="greatest value"),
    comment="percentiles of the jobs done in each hour, interpolated as numpy does",
)

hourly_goodput = sa.Table(
    "hourly_goodput",
    views,
    sa.Column("limits", sa.Text, comment="name in goodput_limits"),
    sa.Column("hour_ms", Ms, comment="begin of the hour in which they ended"),
    sa.Column("queue", sa.Text, comment="of the jobs"),
    sa.Column("jobs", Count, comment="done or failed in this hour"),
    sa.Column("good_jobs", Count, comment="done within every limit"),
    sa.Column("goodput", sa.Double, comment="good_jobs / jobs"),
    sa.Column("good_jobs_per_s", sa.Double, comment="good jobs a second"),
    sa.Column("good_tokens_per_s", sa.Double, comment="output tokens of good jobs"),
    comment="the share of jobs within each set of limits, by hour",
)

job_times = sa.Table(
    "job_times",
    views,
    *(sa.Column(name, sa.Text, comment="of the job") for name in ("id", "queue", "tenant", "state")),
    *(
        sa.Column(f"{name.removesuffix('_ms')}_at", sa.Text, comment=str(jobs.c[name].comment).split(";")[0])
        for name in columns_in("job_times")
    ),
    comment="the times of a job as text: UTC, ISO 8601, milliseconds",
)

timeline = sa.Table(
    "timeline",
    views,
    sa.Column("job_id", sa.Text, comment="of the job"),
    sa.Column("submitted_ms", Ms, comment="when the job was submitted"),
    sa.Column("at_ms", Ms, comment="when it happened"),
    sa.Column("at", sa.Text, comment="at_ms as text: UTC, ISO 8601, milliseconds"),
    sa.Column("event", sa.Text, comment="submitted, pulled, scheduled, first_token, returned, done, failed …"),
    sa.Column("epoch", sa.BigInteger, comment="of the attempt, for pulled and returned"),
    sa.Column("place", sa.BigInteger, comment="orders the events of one millisecond"),
    sa.Column("detail", sa.Text, comment="batch, incarnation, or why"),
    comment="the events of each job in order; in a query that sorts or joins, order by at_ms and place",
)

batch_progress = sa.Table(
    "batch_progress",
    views,
    sa.Column("queue", sa.Text, comment="of its jobs"),
    sa.Column("id", sa.Text, comment="its name"),
    sa.Column("jobs", Count, comment="its jobs"),
    sa.Column("queued", Count, comment="of them, those that wait"),
    sa.Column("running", Count, comment="those that run"),
    sa.Column("done", Count, comment="those that are done"),
    sa.Column("failed", Count, comment="those that failed"),
    sa.Column("cancelled", Count, comment="those cancelled"),
    sa.Column("expired", Count, comment="those that ran out of time"),
    sa.Column("prompt_tokens", Count, comment="of all its jobs"),
    sa.Column("output_tokens", Count, comment="of all its jobs"),
    sa.Column("first_submitted_ms", Ms, comment="first submit"),
    sa.Column("last_finished_ms", Ms, comment="last end so far"),
    comment="totals of a batch, counted from its jobs at each query",
)

_USAGE = {
    "prompt_tokens": "of prompts that were computed",
    "cached_tokens": "of them, those that the prefix cache had",
    "output_tokens": "of all choices",
}

job_costs = sa.Table(
    "job_costs",
    views,
    sa.Column("id", sa.Text, comment="of the job"),
    sa.Column("submitted_ms", Ms, comment="when the job was submitted"),
    sa.Column("hour_ms", Ms, comment="begin of the hour in which it ended"),
    sa.Column("queue", sa.Text, comment="of the job"),
    sa.Column("tenant", sa.Text, comment="of the job"),
    sa.Column("model", sa.Text, comment="of the job"),
    sa.Column("state", sa.Text, comment="of the job"),
    *(sa.Column(name, Count, comment=comment) for name, comment in _USAGE.items()),
    sa.Column("cost", sa.Double, comment="money, in currency; none: its model had no price"),
    sa.Column("currency", sa.Text, comment="of the price"),
    comment="what each ended job cost, by the price at its submit; only computed tokens cost",
)

hourly_usage = sa.Table(
    "hourly_usage",
    views,
    sa.Column("hour_ms", Ms, comment="begin of the hour"),
    sa.Column("queue", sa.Text, comment="of the jobs"),
    sa.Column("tenant", sa.Text, comment="of the jobs"),
    sa.Column("model", sa.Text, comment="of the jobs"),
    sa.Column("currency", sa.Text, comment="of the prices"),
    sa.Column("jobs", Count, comment="that ended in this hour"),
    sa.Column("done", Count, comment="of them, those that are done"),
    *(sa.Column(name, Count, comment=comment) for name, comment in _USAGE.items()),
    sa.Column("cost", sa.Double, comment="money, in currency; none: no job of them had a price"),
    comment="tokens and cost of the jobs that ended in each hour",
)


def queries(*, is_sqlite: bool) -> dict[str, str]:
    """Return the query of each view, in the order in which they can be created."""
    return {
        hourly_latency.name: _hourly_latency(is_sqlite=is_sqlite),
        hourly_goodput.name: _hourly_goodput(),
        job_times.name: _job_times(is_sqlite=is_sqlite),
        timeline.name: _timeline(is_sqlite=is_sqlite),
        batch_progress.name: _batch_progress(),
        job_costs.name: _job_costs(),
        hourly_usage.name: _hourly_usage(),
    }


def _hourly_latency(*, is_sqlite: bool) -> str:
    """Return percentiles by window functions, which both databases have.

    With n values in order, counted from 0, percentile p lies at position p * (n - 1); the value at i weighs max(0, 1 -
    |i - position|): linear interpolation between the two neighbours. So only the rows next to a percentile are summed.

    There is a single window over all values, with one frame for its functions, so that SQLite sorts and passes once.
    There is no GROUP BY, so that a condition on a window's partition reaches the table: SQLite pushes it through
    subqueries with windows, and through a UNION ALL without any, but not through an aggregate over windows. `likely`
    stops it from using the index by state for nearly all jobs.
    """
    is_done = "likely(state = 'done')" if is_sqlite else "state = 'done'"
    group = "PARTITION BY hour_ms, queue, metric"
    samples = " UNION ALL ".join(
        f"SELECT finished_hour_ms AS hour_ms, queue, '{metric}' AS metric, {metric} AS value"
        f" FROM jobs WHERE {is_done} AND {metric} IS NOT NULL"
        for metric in METRICS
    )
    ranked = (
        "SELECT hour_ms, queue, metric, value,"
        " row_number() OVER ordered - 1 AS i, count(*) OVER ordered - 1 AS last, avg(value) OVER ordered AS mean_s"
        f" FROM ({samples}) AS samples"
        f" WINDOW ordered AS ({group} ORDER BY value ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)"
    )
    distances = {percent: f"abs(i - {percent / 100} * last)" for percent in PERCENTILES}
    is_used = " OR ".join(("i = 0", "i = last", *(f"{distance} < 1" for distance in distances.values())))
    few = f"SELECT hour_ms, queue, metric, value, i, last, mean_s FROM ({ranked}) AS ranked WHERE {is_used}"
    percentiles = ", ".join(
        f"sum(CASE WHEN {distance} < 1 THEN value * (1 - {distance}) ELSE 0.0 END) OVER hours AS p{percent}_s"
        for percent, distance in distances.items()
    )
    summed = (
        f"SELECT hour_ms, queue, metric, i, last + 1 AS jobs, mean_s, {percentiles},"
        f" max(value) OVER hours AS max_s FROM ({few}) AS few WINDOW hours AS ({group})"
    )
    return f"SELECT {', '.join(hourly_latency.columns.keys())} FROM ({summed}) AS summed WHERE i = 0"


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


def _iso(ms: str, *, is_sqlite: bool) -> str:
    """Return milliseconds as UTC text, the same on both databases."""
    if is_sqlite:
        return f"strftime('%Y-%m-%dT%H:%M:%fZ', {ms} / 1000.0, 'unixepoch')"
    return f"""to_char(to_timestamp({ms} / 1000.0) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""


def _job_times(*, is_sqlite: bool) -> str:
    times = columns_in("job_times")
    columns = ", ".join(f"{_iso(name, is_sqlite=is_sqlite)} AS {name.removesuffix('_ms')}_at" for name in times)
    return f"SELECT id, queue, tenant, state, {columns} FROM jobs"


_LAST = 2**63 - 1

_MOMENTS = (
    ("submitted_ms", "'submitted'", -1, "batch"),
    ("scheduled_ms", "'scheduled'", _LAST - 2, "CAST(NULL AS TEXT)"),
    ("first_token_ms", "'first_token'", _LAST - 1, "CAST(NULL AS TEXT)"),
    ("finished_ms", "state", _LAST, "coalesce(error, reason)"),
)
"""Events of a job: column, name, place among the events of the same millisecond, detail."""


def _timeline(*, is_sqlite: bool) -> str:
    """Return events with a `place`: between a job's submit and its first schedule, its attempts one after another."""
    columns = "job_id, submitted_ms, at_ms, event, epoch, place, detail"
    of_jobs = [
        f"SELECT id AS job_id, submitted_ms, {column} AS at_ms, {event} AS event, CAST(NULL AS BIGINT) AS epoch,"
        f" CAST({place} AS BIGINT) AS place, {detail} AS detail FROM jobs WHERE {column} IS NOT NULL"
        for column, event, place, detail in _MOMENTS
    ]
    of_attempts = [
        "SELECT job_id, submitted_ms, started_ms AS at_ms, 'pulled' AS event, epoch, epoch * 2 AS place,"
        " incarnation AS detail FROM attempts WHERE started_ms IS NOT NULL",
        "SELECT job_id, submitted_ms, ended_ms AS at_ms, 'returned' AS event, epoch, epoch * 2 + 1 AS place,"
        " why AS detail FROM attempts WHERE outcome = 'returned'",
    ]
    at = _iso("at_ms", is_sqlite=is_sqlite)
    return (
        f"SELECT {columns.replace('event', f'{at} AS at, event')}"
        f" FROM ({' UNION ALL '.join(of_jobs + of_attempts)}) AS moments ORDER BY at_ms, place"
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


def _job_costs() -> str:
    """Return the cost of each job that has ended: by the price that held when it was submitted."""
    valid = "(SELECT max(since_ms) FROM prices AS p WHERE p.model = jobs.model AND p.since_ms <= jobs.submitted_ms)"
    cached = "coalesce(jobs.cached_tokens, 0)"
    cost = (
        f"((coalesce(jobs.prompt_tokens, 0) - {cached}) * prices.input + {cached} * prices.cached"
        " + coalesce(jobs.output_tokens, 0) * prices.output) / 1000000.0"
    )
    tokens = ", ".join(f"jobs.{name}" for name in _USAGE)
    return (
        "SELECT jobs.id, jobs.submitted_ms, jobs.finished_hour_ms AS hour_ms, jobs.queue, jobs.tenant, jobs.model,"
        f" jobs.state, {tokens}, {cost} AS cost, prices.currency"
        f" FROM jobs LEFT JOIN prices ON prices.model = jobs.model AND prices.since_ms = {valid}"
        " WHERE jobs.finished_ms IS NOT NULL"
    )


def _hourly_usage() -> str:
    done = "CAST(sum(CASE WHEN state = 'done' THEN 1 ELSE 0 END) AS BIGINT) AS done"
    tokens = ", ".join(f"CAST(sum(coalesce({name}, 0)) AS BIGINT) AS {name}" for name in _USAGE)
    return (
        f"SELECT hour_ms, queue, tenant, model, currency, count(*) AS jobs, {done}, {tokens}, sum(cost) AS cost"
        " FROM job_costs GROUP BY hour_ms, queue, tenant, model, currency"
    )
