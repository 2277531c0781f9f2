"""Alembic migrations of the history's tables, in order. The target schema is `sluice.history.tables`."""
