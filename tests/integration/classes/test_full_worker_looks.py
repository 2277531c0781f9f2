"""A full worker looks for jobs that may start, and leaves notifications to workers with free room."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from sluice.engine.request import Room
from tests.chaos.faults.proxies import cutting_proxy
from tests.integration.jobs import wait_until
from tests.integration.test_exchange_rounds import Running
from tests.servers import RedisServer

FULL = Room(kv_tokens=1000, prefill_tokens=1000, sequences=1, over_class=0)
LOOK = b"*10\r\n$6\r\nEXISTS\r\n"
"""`EXISTS` of the nine classes over 0, as it is sent; probes ask for one key."""


class TestGivenAFullWorkerWhoseLooksAreNotAnswered:
    """Its pulls are."""

    def test_when_it_looks_then_the_partition_counts_as_unavailable(self, valkey: RedisServer) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="sluice-") as folder,
            cutting_proxy(Path(folder) / "proxy.sock", valkey.socket_path, lambda data: LOOK in data) as proxy,
        ):
            worker = Running(proxy.url)
            worker.context.mailbox.new_requests(FULL, wait_s=0)
            worker.exchange.start()
            try:
                wait_until(lambda: proxy.num_cuts, "it looks")

                wait_until(lambda: worker.context.health.num_outages, "the outage is noted", patience_s=10)
            finally:
                worker.stop()


class TestGivenAPlaceThatIsAboutToBecomeFree:
    """Every place is taken, and one is offered before it is free."""

    def test_when_it_is_free_then_the_worker_listens_and_not_before(self, valkey: RedisServer) -> None:
        free = replace(FULL, over_class=None)
        with valkey.client() as client:

            def is_listening() -> bool:
                return client.info("clients")["blocked_clients"] > 0

            worker = Running(valkey.url)
            worker.context.mailbox.new_requests(replace(free, num_coming=1), wait_s=0)
            worker.listener.start()
            worker.exchange.start()
            try:
                until_s = time.monotonic() + 0.3
                while time.monotonic() < until_s:
                    assert not is_listening()
                worker.context.mailbox.new_requests(free, wait_s=0)

                wait_until(is_listening, "it listens")
            finally:
                worker.stop()
