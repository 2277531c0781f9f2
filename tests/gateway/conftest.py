"""One worker and one gateway for the tests that harm neither."""

from collections.abc import Generator

import pytest

from sluice.history.database import open_database
from sluice.worker.recorder.migrate import migrate
from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.producer.fixtures import history_url as history_url
from tests.producer.fixtures import migrated_postgres_url as migrated_postgres_url
from tests.producer.fixtures import producer as producer
from tests.producer.fixtures import redis_client as redis_client
from tests.producer.fixtures import worker as worker
from tests.servers import RedisServer, redis_server


@pytest.fixture(scope="package")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RedisServer]:
    """A server whose queue a worker with the null model serves."""
    with redis_server("valkey") as server, worker_pool(server.url, tmp_path_factory.mktemp("gateway")) as pool:
        pool.start_all(1)
        yield server


@pytest.fixture(scope="package")
def gateway(queue_server: RedisServer) -> Generator[GatewayProcess]:
    """A gateway of that queue."""
    with gateway_process(queue_server.url) as made:
        yield made


@pytest.fixture(scope="package")
def keys_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database for keys, which tests share."""
    url = f"sqlite:///{tmp_path_factory.mktemp('keys') / 'keys.db'}"
    engine = open_database(url, is_writer=True)
    migrate(engine)
    engine.dispose()
    return url
