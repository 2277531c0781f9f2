"""When the last token of a job was computed: what follows until its end is publishing."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("last_token_ms", sa.BigInteger))


def downgrade() -> None:
    op.drop_column("jobs", "last_token_ms")
