"""Sign-ins of the page, the log of its actions, and the prices of models with views of what jobs cost."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

HAS_ERROR = sa.text("error_code IS NOT NULL")
TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")


def upgrade() -> None:
    op.create_table(
        "page_sessions",
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("page_sessions_by_expiry", "page_sessions", ["expires_ms"])
    op.create_table(
        "audit_log",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("key_id", sa.Text),
        sa.Column("tenant", sa.Text),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("queue", sa.Text),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text),
    )
    op.create_index("audit_log_by_time", "audit_log", ["at_ms"])
    op.create_index("audit_log_by_target", "audit_log", ["target", "at_ms"])
    op.create_table(
        "prices",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("since_ms", sa.BigInteger, primary_key=True),
        sa.Column("input", sa.Double, nullable=False),
        sa.Column("cached", sa.Double, nullable=False),
        sa.Column("output", sa.Double, nullable=False),
        sa.Column("currency", sa.Text, nullable=False),
    )
    op.create_index(
        "jobs_by_error",
        "jobs",
        ["error_code", "submitted_ms"],
        sqlite_where=HAS_ERROR,
        postgresql_where=HAS_ERROR,
    )
    op.execute(f"CREATE VIEW job_costs AS {_job_costs()}")
    op.execute(f"CREATE VIEW hourly_usage AS {_hourly_usage()}")


def downgrade() -> None:
    op.execute("DROP VIEW hourly_usage")
    op.execute("DROP VIEW job_costs")
    op.drop_index("jobs_by_error", "jobs")
    for table in ("prices", "audit_log", "page_sessions"):
        op.drop_table(table)


def _job_costs() -> str:
    """Return the cost of each job that has ended: by the price that held when it was submitted."""
    valid = "(SELECT max(since_ms) FROM prices AS p WHERE p.model = jobs.model AND p.since_ms <= jobs.submitted_ms)"
    cached = "coalesce(jobs.cached_tokens, 0)"
    cost = (
        f"((coalesce(jobs.prompt_tokens, 0) - {cached}) * prices.input + {cached} * prices.cached"
        " + coalesce(jobs.output_tokens, 0) * prices.output) / 1000000.0"
    )
    tokens = ", ".join(f"jobs.{name}" for name in TOKENS)
    return (
        "SELECT jobs.id, jobs.submitted_ms, jobs.finished_hour_ms AS hour_ms, jobs.queue, jobs.tenant, jobs.model,"
        f" jobs.state, {tokens}, {cost} AS cost, prices.currency"
        f" FROM jobs LEFT JOIN prices ON prices.model = jobs.model AND prices.since_ms = {valid}"
        " WHERE jobs.finished_ms IS NOT NULL"
    )


def _hourly_usage() -> str:
    done = "CAST(sum(CASE WHEN state = 'done' THEN 1 ELSE 0 END) AS BIGINT) AS done"
    tokens = ", ".join(f"CAST(sum(coalesce({name}, 0)) AS BIGINT) AS {name}" for name in TOKENS)
    return (
        f"SELECT hour_ms, queue, tenant, model, currency, count(*) AS jobs, {done}, {tokens}, sum(cost) AS cost"
        " FROM job_costs GROUP BY hour_ms, queue, tenant, model, currency"
    )
