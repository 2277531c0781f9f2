"""One place with all processes, for the tests that harm none."""

from collections.abc import Generator
from pathlib import Path

import openai
import pytest

from sluice.gateway.batches.taken import Workshop
from tests.end_to_end.processes import worker_pool
from tests.gateway.batches.processes import Callbacks, Place, place_in
from tests.gateway.gateway_process import GatewayProcess
from tests.servers import RedisServer, redis_server


@pytest.fixture(scope="package")
def batch_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RedisServer]:
    """A server of its own, with a worker: gateways of one queue that keep files in several folders are not ready."""
    with redis_server("valkey") as server, worker_pool(server.url, tmp_path_factory.mktemp("worker")) as pool:
        pool.start_all(1, TOOL_FORMAT="hermes")
        yield server


@pytest.fixture(scope="package")
def place(batch_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Database and folder beside its queue."""
    return place_in(tmp_path_factory.mktemp("batches"), batch_server.url)


@pytest.fixture(scope="package")
def callbacks(place: Place) -> Generator[Callbacks]:
    """Its `worker callbacks`."""
    made = Callbacks(place)
    yield made
    made.kill()


@pytest.fixture(scope="package")
def batch_gateway(place: Place, callbacks: Callbacks) -> Generator[GatewayProcess]:
    """A gateway before them."""
    assert callbacks
    with place.gateway() as made:
        yield made


@pytest.fixture
def client(batch_gateway: GatewayProcess) -> Generator[openai.OpenAI]:
    """The stock client."""
    with batch_gateway.client() as made:
        yield made


@pytest.fixture
def workshop(history_url: str, valkey: RedisServer, tmp_path: Path) -> Generator[Workshop]:
    """What tasks work with, on each database."""
    with Workshop.open(valkey.url, history_url, (tmp_path / "files").as_uri()) as made:
        yield made
