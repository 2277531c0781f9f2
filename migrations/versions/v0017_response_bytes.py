"""What a response takes, and an index from which it is summed by tenant."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    # A gateway of the release before, which may still run, does not name the column.
    op.add_column("responses", sa.Column("bytes", sa.BigInteger, nullable=False, server_default="0"))
    op.execute(
        f"UPDATE responses SET bytes = 1024 + {_size('input')} + {_size('options')} + coalesce({_size('output')}, 0)"
    )
    # An index of its own: in a row, the number comes after the input, which may be megabytes.
    op.create_index("responses_by_size", "responses", ["tenant", "bytes"])


def downgrade() -> None:
    op.drop_index("responses_by_size", "responses")
    op.drop_column("responses", "bytes")


def _size(column: str) -> str:
    if op.get_bind().dialect.name == "sqlite":
        return f"length(CAST({column} AS BLOB))"
    return f"octet_length(CAST({column} AS TEXT))"
