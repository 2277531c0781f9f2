"""An index of the jobs whose prompt is kept, for its erasure."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

HAS_PROMPT = sa.text("prompt IS NOT NULL")


def upgrade() -> None:
    op.create_index(
        "jobs_with_prompt",
        "jobs",
        ["queue", "finished_hour_ms"],
        sqlite_where=HAS_PROMPT,
        postgresql_where=HAS_PROMPT,
    )


def downgrade() -> None:
    op.drop_index("jobs_with_prompt", "jobs")
