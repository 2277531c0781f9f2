"""The test servers themselves."""

import pytest

from tests.servers import RedisServer

pytestmark = pytest.mark.every_server


class TestGivenEachSupportedServer:
    def test_when_asked_then_it_answers_and_is_empty(self, any_redis: RedisServer) -> None:
        with any_redis.client() as client:
            assert client.execute_command("PING")
            assert client.execute_command("DBSIZE") == 0


class TestGivenADurableServer:
    def test_when_it_crashes_and_restarts_then_what_was_written_is_there(self, durable_valkey: RedisServer) -> None:
        with durable_valkey.client() as client:
            client.set("a", "1")
        durable_valkey.restart()
        with durable_valkey.client() as client:
            assert client.get("a") == b"1"
