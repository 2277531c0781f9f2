"""Fixtures of job histories on SQLite, a plugin of the suite."""

from collections.abc import Generator
from pathlib import Path

import pytest
from sqlalchemy.engine import Engine

from sluice.worker.recorder.migrate import migrate
from tests.histories import opened_history


@pytest.fixture(scope="session")
def _migrated_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("history") / "template.db"
    with opened_history(f"sqlite:///{path}") as engine:
        migrate(engine)
    return path.read_bytes()


@pytest.fixture
def sqlite_url(tmp_path: Path, _migrated_file: bytes) -> str:
    """A migrated, empty history on SQLite."""
    path = tmp_path / "history.db"
    path.write_bytes(_migrated_file)
    return f"sqlite:///{path}"


@pytest.fixture
def sqlite_history(sqlite_url: str) -> Generator[Engine]:
    """The same, opened for writing."""
    with opened_history(sqlite_url) as engine:
        yield engine
