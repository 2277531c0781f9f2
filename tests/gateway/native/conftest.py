"""A gateway with keys and a history, for the tests of native routes that harm neither."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process, new_key
from tests.gateway.native.jobs import wait_for
from tests.servers import RedisServer, redis_server

IDLE = "idle"
"""A queue without a worker."""

ALL = ("submit", "read", "control", "admin", "metrics")


@dataclass(frozen=True)
class Native:
    """A gateway, and clients of it with the keys of two tenants."""

    gateway: GatewayProcess
    server: RedisServer
    database_url: str
    acme: httpx.Client
    globex: httpx.Client

    def client(self, *scopes: str, **fields: Any) -> httpx.Client:  # Any: as in `new_key`
        """A client of acme with a key of its own, which the gateway has read."""
        made = self.gateway.http(new_key(self.database_url, "acme", scopes=scopes, **fields))
        wait_for(lambda: made.get("/openapi.json").status_code == 200)
        return made


@pytest.fixture(scope="package")
def native(tmp_path_factory: pytest.TempPathFactory, keys_url: str) -> Generator[Native]:
    """A worker that records, and a gateway that knows the history and its keys."""
    acme, globex = (new_key(keys_url, tenant, scopes=ALL) for tenant in ("acme", "globex"))
    with redis_server("valkey") as server, worker_pool(server.url, tmp_path_factory.mktemp("native")) as pool:
        worker = pool.start(RECORDER="true", DATABASE_URL=keys_url)
        with gateway_process(server.url, "--queue", "default", "--queue", IDLE, database_url=keys_url) as gateway:
            worker.wait_until_started()
            with gateway.http(acme) as first, gateway.http(globex) as second:
                yield Native(gateway, server, keys_url, first, second)
