"""Fixtures of running servers, a plugin of the suite."""

from collections.abc import Iterator

import pytest

from tests.grids import fast_only
from tests.servers import FLAVORS, Flavor, RedisServer, binary_of, how_to_get, redis_server


def _need(flavor: Flavor) -> None:
    if binary_of(flavor) is None:
        pytest.skip(how_to_get(flavor))


@pytest.fixture(scope="session")
def _valkey_process() -> Iterator[RedisServer]:
    _need("valkey")
    with redis_server("valkey") as server:
        yield server


@pytest.fixture
def valkey(_valkey_process: RedisServer) -> RedisServer:
    """A running Valkey 9, emptied before the test."""
    with _valkey_process.client() as client:
        client.execute_command("FLUSHALL")
    return _valkey_process


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of `any_redis` on Valkey; on the other servers those marked `every_server`; in the long suite all."""
    if "_any_redis_process" in metafunc.fixturenames:
        is_everywhere = metafunc.definition.get_closest_marker("every_server") is not None
        flavors = FLAVORS if is_everywhere else fast_only(FLAVORS[:1], FLAVORS[1:])
        metafunc.parametrize("_any_redis_process", flavors, indirect=True, scope="session")


@pytest.fixture(scope="session")
def _any_redis_process(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    _need(request.param)
    with redis_server(request.param) as server:
        yield server


@pytest.fixture
def any_redis(_any_redis_process: RedisServer) -> RedisServer:
    """Valkey 9, emptied before the test; in the cross-section and the long suite Redis 7.0 and 6.2, too."""
    with _any_redis_process.client() as client:
        client.execute_command("FLUSHALL")
        client.execute_command("CONFIG", "SET", "maxmemory", "0")
    return _any_redis_process


@pytest.fixture
def durable_valkey() -> Iterator[RedisServer]:
    """A Valkey of the test's own with an append-only file: it may be killed and restarted."""
    _need("valkey")
    with redis_server("valkey", is_durable=True) as server:
        yield server
