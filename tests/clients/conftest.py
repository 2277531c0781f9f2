"""A worker and a gateway for clients that harm neither, and the clients, each in an environment of its own."""

from collections.abc import Generator

import pytest

from tests.clients.environments import Client, node_client, python_client
from tests.end_to_end.processes import worker_pool
from tests.gateway.batches.processes import place_in
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.servers import RedisServer, redis_server


@pytest.fixture(scope="session")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RedisServer]:
    """A server whose queue a worker with the null model serves."""
    with redis_server("valkey") as server, worker_pool(server.url, tmp_path_factory.mktemp("clients")) as pool:
        pool.start_all(1)
        yield server


@pytest.fixture(scope="session")
def gateway(queue_server: RedisServer) -> Generator[GatewayProcess]:
    """A gateway of that queue."""
    with gateway_process(queue_server.url) as made:
        yield made


@pytest.fixture(scope="session")
def keeping(queue_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    """A gateway of that queue that keeps responses and files, with `worker callbacks` behind it."""
    place = place_in(tmp_path_factory.mktemp("kept"), queue_server.url)
    with place.callbacks(), place.gateway() as made:
        yield made


@pytest.fixture(scope="session", params=["python", "node"])
def openai_client(request: pytest.FixtureRequest) -> Client:
    """OpenAI's own clients."""
    return python_client("openai_python") if request.param == "python" else node_client("openai_node")
