"""One row per submission of a job; the line of a bulk file that it is from; and the longest gap of an attempt."""

from typing import Any

import sqlalchemy as sa
from alembic import op

from sluice.migrations.versions.v0002_views import timeline, views
from sluice.migrations.versions.v0005_hourly_rows import hourly_latency_by_few_rows

revision = "0006"
down_revision = "0005"

KEYS = {"jobs": ("id",), "attempts": ("job_id", "epoch"), "results": ("job_id",)}
"""The primary keys before; afterwards each has the submit time too."""

LINE = {"custom_id": sa.Text, "line": sa.BigInteger, "endpoint": sa.Text}


def upgrade() -> None:
    _drop_views()
    for name, kind in LINE.items():
        op.add_column("jobs", sa.Column(name, kind))
    op.add_column("attempts", sa.Column("gap_s", sa.Double))
    op.execute("UPDATE jobs SET submitted_ms = coalesce(pulled_ms, finished_ms, 0) WHERE submitted_ms IS NULL")
    for table, ended in (("attempts", "coalesce(started_ms, ended_ms, 0)"), ("results", "finished_ms")):
        op.add_column(table, sa.Column("submitted_ms", sa.BigInteger))
        submitted = f"(SELECT submitted_ms FROM jobs WHERE jobs.id = {table}.job_id)"
        op.execute(f"UPDATE {table} SET submitted_ms = coalesce({submitted}, {ended})")
    for table, key in KEYS.items():
        _set_key(table, (*key[:1], "submitted_ms", *key[1:]), is_submitted_null=False)
    _create_views(timeline(is_sqlite=_is_sqlite(), has_submissions=True))


def downgrade() -> None:
    _drop_views()
    _forget_older_submissions()
    for table, key in KEYS.items():
        _set_key(table, key, is_submitted_null=True)
    for table, names in (("results", ["submitted_ms"]), ("attempts", ["submitted_ms", "gap_s"]), ("jobs", LINE)):
        for name in names:
            op.drop_column(table, name)
    _create_views(timeline(is_sqlite=_is_sqlite()))


def _is_sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"


def _drop_views() -> None:
    for name in reversed(list(views(is_sqlite=True))):
        op.execute(f"DROP VIEW {name}")


def _create_views(of_timeline: str) -> None:
    changed = {"hourly_latency": hourly_latency_by_few_rows(), "timeline": of_timeline}
    for name, sql in (views(is_sqlite=_is_sqlite()) | changed).items():
        op.execute(f"CREATE VIEW {name} AS {sql}")


def _set_key(table: str, key: tuple[str, ...], *, is_submitted_null: bool) -> None:
    if _is_sqlite():
        _copy_with_key(table, key, is_submitted_null=is_submitted_null)
        return
    op.drop_constraint(f"{table}_pkey", table, type_="primary")
    op.alter_column(table, "submitted_ms", nullable=is_submitted_null)
    op.create_primary_key(f"{table}_pkey", table, list(key))


def _copy_with_key(name: str, key: tuple[str, ...], *, is_submitted_null: bool) -> None:
    """Replace the primary key as SQLite can: by a copy of the table."""
    bind = op.get_bind()
    old = sa.Table(name, sa.MetaData(), autoload_with=bind)
    of_table = "SELECT sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL AND tbl_name = :name"
    indexes = bind.execute(sa.text(of_table), {"name": name}).scalars().all()
    nullable = {"submitted_ms": is_submitted_null}
    columns = [_copy(column, is_null=nullable.get(column.name, bool(column.nullable))) for column in old.columns]
    op.create_table(f"new_{name}", *columns, sa.PrimaryKeyConstraint(*key))
    stored = ", ".join(f'"{column.name}"' for column in old.columns if column.computed is None)
    op.execute(f"INSERT INTO new_{name} ({stored}) SELECT {stored} FROM {name}")
    op.drop_table(name)
    op.rename_table(f"new_{name}", name)
    for index in indexes:
        op.execute(index)


def _copy(column: sa.Column[Any], *, is_null: bool) -> sa.Column[Any]:  # Any: of several types
    computed = () if column.computed is None else (sa.Computed(column.computed.sqltext, persisted=True),)
    return sa.Column(column.name, column.type, *computed, nullable=is_null)


def _forget_older_submissions() -> None:
    for table, job_id in (("attempts", "job_id"), ("results", "job_id"), ("jobs", "id")):
        newest = f"(SELECT max(submitted_ms) FROM jobs AS newest WHERE newest.id = {table}.{job_id})"
        op.execute(f"DELETE FROM {table} WHERE submitted_ms < {newest}")
