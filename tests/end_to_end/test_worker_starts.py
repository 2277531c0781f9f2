"""Workers that start while their server is not ready."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from sluice.producer import Producer
from sluice.protocol.redis import embedded
from tests.end_to_end.processes import FAST, WorkerProcess, worker_pool
from tests.integration.jobs import wait_until
from tests.servers import RedisServer

SLOW_LOADING = ("--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024")
NUM_KEYS = 200


class TestGivenARedisThatLoadsItsData:
    """It has two hundred keys, and needs 10 ms for each."""

    def test_when_a_worker_starts_meanwhile_then_it_waits(self, durable_valkey: RedisServer, tmp_path: Path) -> None:
        client: Any = durable_valkey.client()  # redis-py types it in part
        with client, worker_pool(durable_valkey.url, tmp_path, WorkerProcess) as workers:
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
            assert "Traceback" not in worker.output


class TestGivenAWorkerOnTheEmbeddedServer:
    def test_when_the_server_is_killed_then_the_worker_starts_it_again_and_ends_it(self, tmp_path: Path) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
        state = tmp_path / "state"
        log = tmp_path / "worker.log"
        with log.open("wb") as stream:
            worker = subprocess.Popen(
                [sys.executable, "-P", "-m", "sluice.worker", "start"],
                env={**environ, **FAST, "SLUICE_STATE_DIR": str(state), "OMP_NUM_THREADS": "1"},
                stdout=stream,
                stderr=stream,
            )
        try:
            wait_until(lambda: "worker started" in log.read_text(), "it is started")
            server = embedded.Embedded(state)
            os.kill(int(server.pid_path.read_text()), signal.SIGKILL)
            wait_until(lambda: "started again" in log.read_text(), "its server is started again")
            with Producer(server.url) as producer:
                result = producer.result(producer.submit("hello", max_tokens=3), timeout_s=60)
        finally:
            worker.terminate()
            worker.wait(60)

        assert result.usage.output_tokens == 3
        assert "embedded server started; it stops with its last user" in log.read_text()
        assert embedded.state_of(server) is embedded.ServerState.STOPPED
