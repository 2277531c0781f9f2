"""The first tables: jobs, attempts, results, batches, goodput_limits."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None

JSON = sa.JSON().with_variant(JSONB(), "postgresql")
TPOT = (
    "CASE WHEN output_tokens > choices"
    " THEN (finished_ms - first_token_ms) / 1000.0 / (1.0 * output_tokens / choices - 1) END"
)
HAS_BATCH = sa.text("batch IS NOT NULL")


def upgrade() -> None:
    _create_jobs()
    _create_attempts()
    _create_results()
    _create_batches()
    _create_goodput_limits()


def downgrade() -> None:
    for table in ("goodput_limits", "batches", "results", "attempts", "jobs"):
        op.drop_table(table)


def _seconds(name: str, later: str, earlier: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double, sa.Computed(f"({later} - {earlier}) / 1000.0", persisted=True))


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("error_code", sa.Text),
        sa.Column("worker", sa.Text),
        sa.Column("finished_ms", sa.BigInteger),
        sa.Column("model", sa.Text),
        sa.Column("fingerprint", sa.Text),
        sa.Column("prompt_tokens", sa.BigInteger),
        sa.Column("cached_tokens", sa.BigInteger),
        sa.Column("output_tokens", sa.BigInteger),
        sa.Column("resumed_tokens", sa.BigInteger),
        sa.Column("preemptions", sa.Integer),
        sa.Column("scheduled_ms", sa.BigInteger),
        sa.Column("first_token_ms", sa.BigInteger),
        sa.Column("itl_p50_s", sa.Double),
        sa.Column("itl_p99_s", sa.Double),
        sa.Column("itl_max_s", sa.Double),
        sa.Column("exactness", sa.Text),
        sa.Column("submitted_ms", sa.BigInteger),
        sa.Column("priority", sa.Integer),
        sa.Column("choices", sa.Integer),
        sa.Column("estimated_prompt_tokens", sa.BigInteger),
        sa.Column("cost", sa.BigInteger),
        sa.Column("seed", sa.Text),
        sa.Column("batch", sa.Text),
        sa.Column("not_before_ms", sa.BigInteger),
        sa.Column("deadline_ms", sa.BigInteger),
        sa.Column("ttl_ms", sa.BigInteger),
        sa.Column("traceparent", sa.Text),
        sa.Column("options", JSON),
        sa.Column("metadata", JSON),
        sa.Column("prompt_sha256", sa.Text),
        sa.Column("prompt", sa.Text),
        sa.Column("pulled_ms", sa.BigInteger),
        sa.Column("attempts", sa.Integer),
        sa.Column("record_error", sa.Text),
        sa.Column("deleted_ms", sa.BigInteger),
        _seconds("queue_s", "scheduled_ms", "submitted_ms"),
        _seconds("ttft_s", "first_token_ms", "submitted_ms"),
        _seconds("e2e_s", "finished_ms", "submitted_ms"),
        sa.Column("tpot_s", sa.Double, sa.Computed(TPOT, persisted=True)),
        sa.Column(
            "finished_hour_ms", sa.BigInteger, sa.Computed("finished_ms - finished_ms % 3600000", persisted=True)
        ),
    )
    op.create_index("jobs_by_state", "jobs", ["state", "submitted_ms"])
    op.create_index("jobs_by_tenant", "jobs", ["tenant", "submitted_ms"])
    op.create_index("jobs_by_queue", "jobs", ["queue", "submitted_ms"])
    op.create_index(
        "jobs_by_batch", "jobs", ["queue", "batch", "state"], sqlite_where=HAS_BATCH, postgresql_where=HAS_BATCH
    )
    op.create_index("jobs_by_hour", "jobs", ["finished_hour_ms"])


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, primary_key=True),
        sa.Column("attempt", sa.Integer),
        sa.Column("incarnation", sa.Text),
        sa.Column("started_ms", sa.BigInteger),
        sa.Column("ended_ms", sa.BigInteger),
        sa.Column("outcome", sa.Text),
        sa.Column("why", sa.Text),
        sa.Column("end_version", sa.BigInteger),
    )
    op.create_index("attempts_by_incarnation", "attempts", ["incarnation", "started_ms"])


def _create_results() -> None:
    op.create_table(
        "results",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("finished_ms", sa.BigInteger, nullable=False),
        sa.Column("choices", JSON, nullable=False),
        sa.Column("usage", JSON, nullable=False),
    )


def _create_batches() -> None:
    counters = ("jobs", "queued", "running", "done", "failed", "cancelled", "expired")
    op.create_table(
        "batches",
        sa.Column("queue", sa.Text, primary_key=True),
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("completed_ms", sa.BigInteger),
        sa.Column("refreshed_ms", sa.BigInteger),
        *(sa.Column(counter, sa.BigInteger, nullable=False, server_default="0") for counter in counters),
    )
    op.create_index("batches_by_time", "batches", ["created_ms"])


def _create_goodput_limits() -> None:
    op.create_table(
        "goodput_limits",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("ttft_s", sa.Double),
        sa.Column("tpot_s", sa.Double),
        sa.Column("e2e_s", sa.Double),
    )
