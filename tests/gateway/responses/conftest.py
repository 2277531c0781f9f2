"""A gateway with a database, on the queue that all tests of the gateway share."""

from collections.abc import Generator

import openai
import pytest

from sluice.history.database import open_database
from sluice.worker.recorder.migrate import migrate
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.servers import RedisServer


@pytest.fixture(scope="package")
def responses_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database without keys."""
    url = f"sqlite:///{tmp_path_factory.mktemp('responses') / 'responses.db'}"
    engine = open_database(url, is_writer=True)
    migrate(engine)
    engine.dispose()
    return url


@pytest.fixture(scope="package")
def keeping(queue_server: RedisServer, responses_url: str) -> Generator[GatewayProcess]:
    """A gateway that keeps responses there."""
    with gateway_process(queue_server.url, database_url=responses_url) as made:
        yield made


@pytest.fixture(scope="package")
def client(keeping: GatewayProcess) -> Generator[openai.OpenAI]:
    """The stock client."""
    with keeping.client() as made:
        yield made
