"""Fixtures of running servers, a plugin of the suite."""

from collections.abc import Iterator

import pytest

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
        client.execute_command("SCRIPT", "FLUSH")
    return _valkey_process


@pytest.fixture(scope="session", params=FLAVORS)
def _any_redis_process(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    _need(request.param)
    with redis_server(request.param) as server:
        yield server


@pytest.fixture
def any_redis(_any_redis_process: RedisServer) -> RedisServer:
    """Each supported server in turn (Valkey 9, Redis 7.0, Redis 6.2), emptied before the test."""
    with _any_redis_process.client() as client:
        client.execute_command("FLUSHALL")
        client.execute_command("SCRIPT", "FLUSH")
        client.execute_command("CONFIG", "SET", "maxmemory", "0")
    return _any_redis_process


@pytest.fixture
def durable_valkey() -> Iterator[RedisServer]:
    """A Valkey of the test's own with an append-only file: it may be killed and restarted."""
    _need("valkey")
    with redis_server("valkey", is_durable=True) as server:
        yield server
