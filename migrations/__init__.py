"""Alembic migrations of the history's tables, in order. The target schema is `sluice.producer.contract.tables`."""
