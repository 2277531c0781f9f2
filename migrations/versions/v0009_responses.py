"""The responses that the gateway keeps."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

JSON = sa.JSON(none_as_null=True)
IS_OPEN = sa.text("status = 'open'")


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
        sa.Column("previous_id", sa.Text),
        sa.Column("depth", sa.Integer, nullable=False),
        sa.Column("is_background", sa.Boolean, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("options", JSON, nullable=False),
        sa.Column("input", JSON, nullable=False),
        sa.Column("idempotency_key", sa.Text),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("ended_ms", sa.BigInteger),
        sa.Column("output", JSON),
        sa.Column("usage", JSON),
        sa.Column("error", JSON),
    )
    op.create_index("responses_by_key", "responses", ["tenant", "idempotency_key"], unique=True)
    op.create_index("responses_by_expiry", "responses", ["expires_ms"])
    op.create_index("responses_open", "responses", ["id"], sqlite_where=IS_OPEN, postgresql_where=IS_OPEN)


def downgrade() -> None:
    op.drop_table("responses")
