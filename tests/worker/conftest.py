"""A migrated, empty history on each database, and the outbox of a real Valkey."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Engine
from structlog.testing import LogCapture

from sluice.producer.contract.database import open_database
from sluice.producer.contract.tables import SCHEMA_REVISION
from sluice.worker.history.migrate import migrate
from tests.postgres import HOW_TO_GET, PostgresServer, has_postgres, postgres_server


@contextmanager
def _opened(url: str) -> Generator[Engine]:
    engine = open_database(url, is_writer=True)
    try:
        yield engine
    finally:
        engine.dispose()


@pytest.fixture(scope="session")
def postgres() -> Generator[PostgresServer]:
    """A running PostgreSQL, shared by all tests; each makes its databases."""
    if not has_postgres():
        pytest.skip(HOW_TO_GET)
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def _migrated_database(postgres: PostgresServer) -> str:
    url = postgres.url(postgres.create_database())
    with _opened(url) as engine:
        migrate(engine)
    return url


@pytest.fixture
def postgres_url(_migrated_database: str) -> str:
    """A migrated, empty history on PostgreSQL; one database, emptied before each test."""
    with _opened(_migrated_database) as engine, engine.begin() as connection:
        connection.execute(sa.text("TRUNCATE jobs, attempts, results, batches"))
        connection.execute(sa.text(f"UPDATE alembic_version SET version_num = '{SCHEMA_REVISION}'"))
    return _migrated_database


@pytest.fixture
def postgres_empty_url(postgres: PostgresServer) -> Generator[str]:
    """A database on PostgreSQL without tables."""
    name = postgres.create_database()
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture(scope="session")
def _migrated_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("history") / "template.db"
    engine = open_database(f"sqlite:///{path}", is_writer=True)
    migrate(engine)
    engine.dispose()
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
    with _opened(sqlite_url) as engine:
        yield engine


@pytest.fixture
def postgres_history(postgres_url: str) -> Generator[Engine]:
    """The same, opened for writing."""
    with _opened(postgres_url) as engine:
        yield engine


@pytest.fixture(params=["sqlite", "postgres"])
def history_url(request: pytest.FixtureRequest) -> str:
    """A migrated, empty history on each database in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def history(history_url: str) -> Generator[Engine]:
    """The same, opened for writing."""
    with _opened(history_url) as engine:
        yield engine


@pytest.fixture
def log() -> Generator[LogCapture]:
    """What is logged."""
    capture = LogCapture()
    # Whatever another test of this process has configured: a level would keep lines from being said at all.
    structlog.reset_defaults()
    structlog.configure(processors=[capture], cache_logger_on_first_use=False)
    yield capture
    structlog.reset_defaults()
