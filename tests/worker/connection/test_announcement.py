"""The announcement of a worker that loads its model, on a real server."""

from typing import Any

from sluice.producer import Producer
from sluice.producer.contract.keys import QueueKeys
from sluice.worker.connection.announcement import announced
from tests.servers import RedisServer


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
