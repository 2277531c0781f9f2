"""Workers that start while their server is not ready."""

from pathlib import Path
from typing import Any

from tests.end_to_end.processes import crew
from tests.integration.jobs import wait_until
from tests.servers import RedisServer

SLOW_LOADING = ("--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024")
NUM_KEYS = 200


class TestGivenARedisThatLoadsItsData:
    """It has two hundred keys, and needs 10 ms for each."""

    def test_when_a_worker_starts_meanwhile_then_it_waits(self, durable_valkey: RedisServer, tmp_path: Path) -> None:
        client: Any = durable_valkey.client()  # redis-py types it in part
        with client, crew(durable_valkey.url, tmp_path) as workers:
            for number in range(NUM_KEYS):
                client.set(f"other:{number}", "x" * 2000)
            # Of a rewritten file the server reads key by key, and answers in between.
            client.bgrewriteaof()
            wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], "it is rewritten")
            durable_valkey.stop()
            worker = workers.start()
            worker.wait_for_line("waiting for redis")
            durable_valkey.extra = SLOW_LOADING

            durable_valkey.start()

            worker.wait_until_started()
            assert "Traceback" not in worker.said
