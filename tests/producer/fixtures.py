"""A client and a worker moved by hand, on a real server."""

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from sluice.producer import Producer
from sluice.worker.recorder.migrate import migrate
from tests.histories import opened_history
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
def migrated_postgres_url() -> Generator[str]:
    if not has_postgres():
        pytest.skip(HOW_TO_GET)
    with postgres_server() as server:
        yield server.url(server.create_database())


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def history_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A migrated history on each database in turn; each test uses other ids."""
    if request.param == "postgres":
        url = str(request.getfixturevalue("migrated_postgres_url"))
    else:
        url = f"sqlite:///{tmp_path_factory.mktemp('history') / 'history.db'}"
    _migrated(url)
    return url


def _migrated(url: str) -> None:
    with opened_history(url) as engine:
        migrate(engine)
