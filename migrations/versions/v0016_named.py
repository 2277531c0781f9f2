"""Columns named for what they are, a timeline in order, and no prompt tokens for jobs that were never scheduled."""

from alembic import op

from sluice.migrations.versions.v0002_views import iso, timeline

revision = "0016"
down_revision = "0015"

LAST = 2**63 - 1

MOMENTS = (
    ("submitted_ms", "'submitted'", -1, "batch"),
    ("scheduled_ms", "'scheduled'", LAST - 2, "CAST(NULL AS TEXT)"),
    ("first_token_ms", "'first_token'", LAST - 1, "CAST(NULL AS TEXT)"),
    ("finished_ms", "state", LAST, "coalesce(error, reason)"),
)
"""Events of a job: column, name, place among the events of the same millisecond, detail."""


def upgrade() -> None:
    op.alter_column("jobs", "cost", new_column_name="reserved_tokens")
    _replace_timeline(_timeline_in_order())
    # Until now a job that was refused had the estimate of its submit, and was charged for it.
    op.execute(
        "UPDATE jobs SET prompt_tokens = NULL WHERE finished_ms IS NOT NULL AND scheduled_ms IS NULL"
        " AND first_token_ms IS NULL AND prompt_tokens IS NOT NULL"
    )


def downgrade() -> None:
    op.alter_column("jobs", "reserved_tokens", new_column_name="cost")
    _replace_timeline(timeline(is_sqlite=_is_sqlite(), has_submissions=True))


def _is_sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"


def _replace_timeline(sql: str) -> None:
    op.execute("DROP VIEW timeline")
    op.execute(f"CREATE VIEW timeline AS {sql}")


def _timeline_in_order() -> str:
    """Return the view with `place`: between a job's submit and its first schedule, its attempts one after another."""
    columns = "job_id, submitted_ms, at_ms, event, epoch, place, detail"
    of_jobs = [
        f"SELECT id AS job_id, submitted_ms, {column} AS at_ms, {event} AS event, CAST(NULL AS BIGINT) AS epoch,"
        f" CAST({place} AS BIGINT) AS place, {detail} AS detail FROM jobs WHERE {column} IS NOT NULL"
        for column, event, place, detail in MOMENTS
    ]
    of_attempts = [
        "SELECT job_id, submitted_ms, started_ms AS at_ms, 'pulled' AS event, epoch, epoch * 2 AS place,"
        " incarnation AS detail FROM attempts WHERE started_ms IS NOT NULL",
        "SELECT job_id, submitted_ms, ended_ms AS at_ms, 'returned' AS event, epoch, epoch * 2 + 1 AS place,"
        " why AS detail FROM attempts WHERE outcome = 'returned'",
    ]
    at = iso("at_ms", is_sqlite=_is_sqlite())
    return (
        f"SELECT {columns.replace('event', f'{at} AS at, event')}"
        f" FROM ({' UNION ALL '.join(of_jobs + of_attempts)}) AS moments ORDER BY at_ms, place"
    )
