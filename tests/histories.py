"""Job histories that tests write to."""

from collections.abc import Generator
from contextlib import contextmanager

from sqlalchemy.engine import Engine

from sluice.history.database import open_database


@contextmanager
def opened_history(url: str) -> Generator[Engine]:
    """A history, opened for writing."""
    engine = open_database(url, is_writer=True)
    try:
        yield engine
    finally:
        engine.dispose()
