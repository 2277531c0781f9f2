"""The announcement of a worker that loads its model, on a real server."""

from typing import Any

import pytest
import redis

from sluice.producer import Producer
from sluice.protocol.keys import QueueKeys
from sluice.worker.connection import announcement
from sluice.worker.connection.announcement import announced
from tests.integration.jobs import wait_until
from tests.servers import RedisServer


class CountingClient(redis.Redis):
    """A client that counts its commands that failed."""

    num_failed = 0

    def execute_command(self, *args: Any, **options: Any) -> Any:  # Any: as redis-py
        try:
            return super().execute_command(*args, **options)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # partly typed
        except redis.RedisError:
            self.num_failed += 1
            raise


class TestGivenAWorkerThatLoadsItsModel:
    def test_when_a_producer_looks_then_it_is_announced_until_the_model_is_loaded(self, valkey: RedisServer) -> None:
        client: Any = valkey.client()
        with Producer(valkey.url) as producer:
            job = producer.submit("hello")

            with announced(client, [QueueKeys("default", 0)]):
                while not client.hexists(QueueKeys("default", 0).key("config"), "starting"):
                    pass
                during = producer.status(job).waits_for
            after = producer.status(job).waits_for

        assert during is not None
        assert "loads its model" in during
        assert after is not None
        assert "no worker serves" in after

    def test_when_redis_was_away_meanwhile_then_it_is_announced_again(
        self, durable_valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(announcement, "EVERY_S", 0.05)
        keys = QueueKeys("default", 0)
        durable_valkey.stop()
        client: Any = CountingClient(unix_socket_path=str(durable_valkey.socket_path))

        with announced(client, [keys]):
            wait_until(lambda: client.num_failed >= 1, "a notice is lost")
            durable_valkey.start()

            wait_until(lambda: durable_valkey.client().hexists(keys.key("config"), "starting"), "it is announced")

    def test_when_one_partition_cannot_be_written_then_the_others_are_announced(self, valkey: RedisServer) -> None:
        client: Any = valkey.client()
        bad, good = QueueKeys("default", 0), QueueKeys("default", 1)
        client.set(bad.key("config"), "of another program")

        with announced(client, [bad, good]):
            wait_until(lambda: client.hexists(good.key("config"), "starting"), "it is announced")

        assert not client.hexists(good.key("config"), "starting")
