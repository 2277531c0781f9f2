"""A worker that looks for an idle one, and hands it a job, stays as fit to declare others dead as it was."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

from sluice.protocol.wire import JobOptions
from sluice.worker.config import load_config
from sluice.worker.connection.clients import Connections
from sluice.worker.model.load import load
from sluice.worker.serve.start import build
from tests.integration.jobs import KEYS, Ask, num_on_channel, submit_all, wait_until
from tests.integration.workers import FAST, running_worker
from tests.servers import RedisServer

BATCH = Ask(options=JobOptions(max_tokens=8_000), stream=False)
URGENT = Ask(prompt="now", options=JobOptions(max_tokens=8_000), priority=9)
SLOW = "null?step_s=0.02"


@contextmanager
def worker_over(connections: Connections, url: str) -> Generator[None]:
    """Run a worker with one place over these connections."""
    flags = {"redis.url": url, "model.path": SLOW, "batching.max_num_seqs": 1, "drain.mode": "hand-over"}
    config = load_config({}, flags={**FAST, **flags})
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

            with running_worker(valkey.url, model__path=SLOW, drain__mode="hand-over") as idle:
                wait_until(lambda: client.hexists(KEYS.key("held", idle.incarnation), batch), "the idle one has it")

            assert connections.uplink.since_s == since_s
