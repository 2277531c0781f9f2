"""A submit wakes one idle worker. If that one is stopped at this moment, another one takes the job in time."""

import signal
from pathlib import Path
from typing import Any

import pytest

from sluice.protocol.rows import read_row
from sluice.protocol.wire import JobId, JobOptions
from sluice.worker.connection.listeners import ACKNOWLEDGED_WITHIN_MS
from tests.end_to_end.processes import WorkerProcess, worker_pool
from tests.integration.jobs import KEYS, Ask, field_of, submit_all, wait_for_ends, wait_until
from tests.servers import RedisServer

AT_MOST_MS = 200
NUM_LOST, MAX_ROUNDS = 3, 60
ONE_TOKEN = Ask(options=JobOptions(max_tokens=1))
LONG_LIFE = {"BEAT_LIFE_S": "600", "MODEL": "null"}


def waited_ms(client: Any, job_id: JobId) -> int:
    """From the submit to its lease, by the server's clock."""
    row = read_row(client.get(KEYS.job(job_id)))
    return row.started_ms - row.submitted_ms


def submit_beside(client: Any, stopped: WorkerProcess) -> int:
    """Submit a job to two idle workers, one of which was stopped just now; return how long it waited."""
    wait_until(lambda: client.info("clients")["blocked_clients"] == 2, "both listen")
    stopped.signal_worker(signal.SIGSTOP)
    (job_id,) = submit_all(client, [ONE_TOKEN])
    # A pull of the stopped one may have been under way: then it holds the job until it continues.
    wait_until(lambda: field_of(client, job_id, "started"), "one takes it")
    stopped.signal_worker(signal.SIGCONT)
    wait_for_ends(client, [job_id])
    return waited_ms(client, job_id)


class TestGivenTwoIdleWorkers:
    @pytest.mark.long
    def test_when_the_woken_one_is_stopped_then_the_other_takes_the_job_in_time(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        waits_ms: list[int] = []
        with valkey.client() as client, worker_pool(valkey.url, tmp_path) as workers:
            first, _ = workers.start_all(2, **LONG_LIFE)
            while sum(ms >= ACKNOWLEDGED_WITHIN_MS for ms in waits_ms) < NUM_LOST and len(waits_ms) < MAX_ROUNDS:
                waits_ms.append(submit_beside(client, first))

        assert max(waits_ms) <= AT_MOST_MS, waits_ms
        assert len(waits_ms) < MAX_ROUNDS, "a wake-up was never lost"
