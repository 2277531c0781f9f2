"""Files and batches of the gateway."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0008"
down_revision = "0007"

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("objects", JSON, nullable=False),
    )
    op.create_index("files_by_tenant", "files", ["tenant", "created_ms", "id"])
    op.create_table(
        "gateway_batches",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("partitions", sa.Integer, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("model", sa.Text),
        sa.Column("input_file", sa.Text, nullable=False),
        sa.Column("window", sa.Text, nullable=False),
        sa.Column("metadata", JSON),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
        sa.Column("times", JSON, nullable=False),
        sa.Column("errors", JSON),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("completed", sa.BigInteger, nullable=False),
        sa.Column("failed", sa.BigInteger, nullable=False),
        sa.Column("output_file", sa.Text),
        sa.Column("error_file", sa.Text),
        sa.Column("names", sa.Text),
        sa.Column("submitted", sa.BigInteger, nullable=False),
        sa.Column("refused", sa.BigInteger, nullable=False),
        sa.Column("expired", sa.BigInteger, nullable=False),
        sa.Column("collected", sa.LargeBinary),
        sa.Column("parts", JSON, nullable=False),
        sa.Column("written_ms", sa.BigInteger),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("due_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("gateway_batches_by_tenant", "gateway_batches", ["tenant", "created_ms", "id"])
    op.create_index("gateway_batches_by_status", "gateway_batches", ["status", "due_ms"])


def downgrade() -> None:
    op.drop_table("gateway_batches")
    op.drop_table("files")
