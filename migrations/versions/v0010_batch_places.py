"""Where a batch goes on in its input file, and where the next look at its jobs begins."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

PLACES = ("file_offset", "looked_at")


def upgrade() -> None:
    for name in PLACES:
        op.add_column("gateway_batches", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    for name in PLACES:
        op.drop_column("gateway_batches", name)
