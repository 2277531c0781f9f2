"""A worker that looks for an idle one, and hands it a job, stays as fit to declare others dead as it was."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

from sluice.producer.contract.wire import JobOptions
from sluice.worker.config import load_config
from sluice.worker.connection.clients import Connections
from sluice.worker.model.load import load
from sluice.worker.serve.start import build
from tests.integration.jobs import KEYS, Ask, num_on_channel, submit_all, wait_until
from tests.integration.workers import FAST, running_worker
from tests.servers import RedisServer

BATCH = Ask(options=JobOptions(max_tokens=10_000), stream=False)
URGENT = Ask(prompt="now", options=JobOptions(max_tokens=10_000), priority=9)
ONE_PLACE: dict[str, object] = {
    "model.path": "null?step_s=0.02",
    "batching.max_num_seqs": 1,
    "drain.mode": "hand-over",
}


@contextmanager
def worker_over(connections: Connections, url: str) -> Generator[None]:
    """Run a worker over these connections."""
    config = load_config({}, flags={"redis.url": url, **FAST, **ONE_PLACE})
    daemon = build(config, connections, load(config), "me")
    thread = threading.Thread(target=daemon.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        daemon.stop()
        thread.join(30)
        connections.stop()


class TestGivenAWorkerThatPreemptedAJob:
    """It has one place, which a job of class 9 took from one of class 0."""

    def test_when_the_job_goes_to_an_idle_worker_then_that_is_no_reconnection(self, valkey: RedisServer) -> None:
        connections = Connections(valkey.url, timeout_s=5)
        with valkey.client() as client, worker_over(connections, valkey.url):
            (batch,) = submit_all(client, [BATCH])
            wait_until(lambda: num_on_channel(client, batch), "it generates")
            (urgent,) = submit_all(client, [URGENT])
            wait_until(lambda: num_on_channel(client, urgent), "it gives way")
            since_s = connections.uplink.since_s

            flags = {name.replace(".", "__"): value for name, value in ONE_PLACE.items()}
            with running_worker(valkey.url, **flags) as idle:
                wait_until(lambda: client.hexists(KEYS.key("held", idle.incarnation), batch), "the idle one has it")

            assert connections.uplink.since_s == since_s
