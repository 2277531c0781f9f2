"""A client and a worker moved by hand, on a real server."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.producer import Producer
from sluice.producer.contract.database import open_database
from sluice.worker.history.migrate import migrate
from tests.postgres import HOW_TO_GET, has_postgres, postgres_server
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer


@pytest.fixture
def producer(valkey: RedisServer) -> Iterator[Producer]:
    """A client of the queue `default`."""
    with Producer(valkey.url) as client:
        yield client


@pytest.fixture
def redis_client(valkey: RedisServer) -> Iterator[Any]:
    """A plain connection to the same server."""
    with valkey.client() as client:
        yield client


@pytest.fixture
def worker(redis_client: Any) -> HandWorker:
    """The worker's side of the queue `default`."""
    return HandWorker(redis_client)


@pytest.fixture(scope="session")
def _postgres_url() -> Generator[str]:
    if not has_postgres():
        pytest.skip(HOW_TO_GET)
    with postgres_server() as server:
        yield server.url(server.create_database())


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def history_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A migrated history on each database in turn; each test uses other ids."""
    if request.param == "postgres":
        url = str(request.getfixturevalue("_postgres_url"))
    else:
        url = f"sqlite:///{tmp_path_factory.mktemp('history') / 'history.db'}"
    _migrated(url)
    return url


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("template") / "history.db"
    _migrated(f"sqlite:///{path}")
    return path.read_bytes()


@pytest.fixture
def sqlite_url(tmp_path: Path, _sqlite_template: bytes) -> str:
    """A migrated, empty history on SQLite."""
    path = tmp_path / "own.db"
    path.write_bytes(_sqlite_template)
    return f"sqlite:///{path}"


def _migrated(url: str) -> None:
    engine = open_database(url, is_writer=True)
    migrate(engine)
    engine.dispose()
