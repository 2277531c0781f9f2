"""The first schema: all that `sluice.history` declares.

No release has it yet. So it is not a copy of the declarations: a change of them gives the schema a new number
(`SCHEMA_REVISION`), and databases with an older one are refused. With the first release it becomes a copy.
"""

from alembic import op

from sluice.history.tables import SCHEMA_REVISION, goodput_limits, metadata
from sluice.history.views import queries, views

revision = SCHEMA_REVISION
down_revision = None

GOODPUT_LIMITS = (
    {"name": "chat", "ttft_s": 1.0, "tpot_s": 0.1, "e2e_s": None},
    {"name": "background", "ttft_s": None, "tpot_s": None, "e2e_s": 3600.0},
)


def upgrade() -> None:
    bind = op.get_bind()
    # Not only those that are missing: a table of another program must not be taken for one of these.
    metadata.create_all(bind, checkfirst=False)
    for view, query in queries(is_sqlite=bind.dialect.name == "sqlite").items():
        op.execute(f"CREATE VIEW {view} AS {query}")
    bind.execute(goodput_limits.insert(), GOODPUT_LIMITS)


def downgrade() -> None:
    for view in reversed(views.tables):
        op.execute(f"DROP VIEW {view}")
    metadata.drop_all(op.get_bind())
