"""A migrated, empty history on each database, and a queue on a real Valkey."""

from collections.abc import Generator

import pytest
import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Engine
from structlog.testing import LogCapture

from sluice.history.database import VERSION_TABLE
from sluice.history.tables import SCHEMA_REVISION
from sluice.worker.recorder.migrate import migrate
from tests.histories import opened_history
from tests.postgres import HOW_TO_GET, PostgresServer, has_postgres, postgres_server
from tests.protocol.driving import Queue
from tests.servers import RedisServer
from tests.worker.audit.audits import Scene


@pytest.fixture(scope="session")
def postgres() -> Generator[PostgresServer]:
    """A running PostgreSQL, shared by all tests; each makes its databases."""
    if not has_postgres():
        pytest.skip(HOW_TO_GET)
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def migrated_database(postgres: PostgresServer) -> str:
    url = postgres.url(postgres.create_database())
    with opened_history(url) as engine:
        migrate(engine)
    return url


@pytest.fixture
def postgres_url(migrated_database: str) -> str:
    """A migrated, empty history on PostgreSQL; one database, emptied before each test."""
    with opened_history(migrated_database) as engine, engine.begin() as connection:
        connection.execute(sa.text("TRUNCATE jobs, attempts, results, batches"))
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '{SCHEMA_REVISION}'"))
    return migrated_database


@pytest.fixture
def postgres_empty_url(postgres: PostgresServer) -> Generator[str]:
    """A database on PostgreSQL without tables."""
    name = postgres.create_database()
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture
def postgres_history(postgres_url: str) -> Generator[Engine]:
    """The same, opened for writing."""
    with opened_history(postgres_url) as engine:
        yield engine


@pytest.fixture(params=["sqlite", "postgres"])
def history_url(request: pytest.FixtureRequest) -> str:
    """A migrated, empty history on each database in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def history(history_url: str) -> Generator[Engine]:
    """The same, opened for writing."""
    with opened_history(history_url) as engine:
        yield engine


@pytest.fixture
def scene(valkey: RedisServer, history: Engine) -> Generator[Scene]:
    """An empty queue whose history keeps prompts, on each database."""
    yield from _scene_on(valkey, history)


@pytest.fixture
def one_scene(valkey: RedisServer, sqlite_history: Engine) -> Generator[Scene]:
    """The same, on SQLite alone."""
    yield from _scene_on(valkey, sqlite_history)


def _scene_on(server: RedisServer, history: Engine) -> Generator[Scene]:
    with server.client() as client:
        queue = Queue(client)
        queue.stop_clock()
        queue.configure(keep_prompts="full")
        yield Scene(server, queue, history)


@pytest.fixture
def log() -> Generator[LogCapture]:
    """What is logged."""
    capture = LogCapture()
    # Whatever another test of this process has configured: a level would keep lines from being said at all.
    structlog.reset_defaults()
    structlog.configure(processors=[capture], cache_logger_on_first_use=False)
    yield capture
    structlog.reset_defaults()
