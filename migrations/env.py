"""Alembic environment: run migrations on the connection that the caller (`worker/recorder/migrate.py`) gives.

There is no offline mode and no ini file: only `worker migrate` changes a history's schema.
"""

from alembic import context
from sqlalchemy import Connection

from sluice.history.database import VERSION_TABLE
from sluice.history.tables import metadata


def run() -> None:
    """Run the requested migrations in one transaction of the given connection."""
    connection = context.config.attributes["connection"]
    assert isinstance(connection, Connection)
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table=VERSION_TABLE,
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
