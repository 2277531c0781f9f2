"""The line of a bulk file that a job is from, and the longest gap of an attempt."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("custom_id", sa.Text))
    op.add_column("jobs", sa.Column("line", sa.BigInteger))
    op.add_column("jobs", sa.Column("endpoint", sa.Text))
    op.add_column("attempts", sa.Column("gap_s", sa.Double))


def downgrade() -> None:
    op.drop_column("attempts", "gap_s")
    for name in ("endpoint", "line", "custom_id"):
        op.drop_column("jobs", name)
