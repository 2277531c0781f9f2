"""What a job was sampled with: its request's options, or else its model's defaults."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("sampling", sa.JSON().with_variant(JSONB(), "postgresql")))


def downgrade() -> None:
    op.drop_column("jobs", "sampling")
