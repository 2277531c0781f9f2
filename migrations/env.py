"""How alembic runs a step: on the connection that the caller gives. `worker/migrate.py` is the caller.

There is no offline mode and no ini file: the schema of a history is changed by `worker migrate` alone.
"""

from alembic import context
from sqlalchemy import Connection

from producer.contract.tables import metadata


def run() -> None:
    """Run the asked steps in one transaction of the given connection."""
    connection = context.config.attributes["connection"]
    assert isinstance(connection, Connection)
    context.configure(
        connection=connection,
        target_metadata=metadata,
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
