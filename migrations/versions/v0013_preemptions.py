"""What interrupted an attempt: its preemptions, with how long until it ran again, and the death of its worker."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("seen_ms", sa.BigInteger))
    op.add_column("attempts", sa.Column("preempted_s", sa.Double))
    op.add_column("attempts", sa.Column("preemption_times", sa.JSON().with_variant(JSONB(), "postgresql")))


def downgrade() -> None:
    op.drop_column("attempts", "preemption_times")
    op.drop_column("attempts", "preempted_s")
    op.drop_column("attempts", "seen_ms")
