"""Real workers whose engine has a process of its own: either is killed, and every token is still there once.

`make test-engine-process` runs tests/end_to_end with such workers.
"""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.protocol.wire import JobId, JobOptions
from sluice.worker.errors import ExitCode
from tests.end_to_end.processes import WorkerPool, WorkerProcess, worker_pool
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    num_on_channel,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.servers import RedisServer

OWN_PROCESS = {"ENGINE_PROCESS": "on", "MAX_NUM_SEQS": "16"}


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:  # Any: redis-py's clients share no typed base
    with valkey.client() as client:
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path, client: Any) -> Generator[WorkerPool]:
    del client
    with worker_pool(valkey.url, tmp_path) as made:
        yield made


def engine_of(worker: WorkerProcess) -> psutil.Process:
    """Return the process of a worker's engine."""
    (engine,) = [
        one for one in psutil.Process(worker.pid).children() if "sluice.worker.engine_process" in one.cmdline()
    ]
    return engine


def begun_jobs(client: Any, asks: list[Ask]) -> list[JobId]:
    """Submit jobs, and wait until each is in mid-generation."""
    job_ids = submit_all(client, asks)
    wait_until(lambda: all(num_on_channel(client, one) >= 10 for one in job_ids), "all jobs speak")
    return job_ids


class TestGivenAWorkerInMidGeneration:
    ASKS = tuple(
        Ask(prompt=f"job {i}", options=JobOptions(max_tokens=100, n=1 + i % 2, stop=("zz",)), seed=i) for i in range(8)
    )

    def test_when_its_engine_is_killed_then_it_hands_its_jobs_back_and_they_continue(
        self, workers: WorkerPool, client: Any
    ) -> None:
        broken = workers.start_all(1, **OWN_PROCESS)[0]
        job_ids = begun_jobs(client, [*self.ASKS])

        engine_of(broken).kill()

        assert broken.wait() == ExitCode.BROKEN
        assert "the engine's process ended: signal 9" in broken.output
        workers.start_all(1, **OWN_PROCESS)
        wait_for_ends(client, job_ids)
        check_every_token_once(client, dict(zip(job_ids, self.ASKS, strict=True)))
        check_nothing_is_left(client)

    def test_when_it_is_killed_itself_then_its_engine_ends_and_another_worker_continues(
        self, workers: WorkerPool, client: Any
    ) -> None:
        killed = workers.start_all(1, **OWN_PROCESS)[0]
        job_ids = begun_jobs(client, [*self.ASKS])
        engine = engine_of(killed)

        killed.signal_worker(signal.SIGKILL)

        engine.wait(5)
        workers.start_all(1, **OWN_PROCESS)
        wait_for_ends(client, job_ids)
        check_every_token_once(client, dict(zip(job_ids, self.ASKS, strict=True)))
        check_nothing_is_left(client)

    def test_when_it_is_signalled_then_its_engine_logs_sequences_and_outlasts_a_stop(
        self, workers: WorkerPool, client: Any
    ) -> None:
        worker = workers.start_all(1, **OWN_PROCESS)[0]
        job_ids = begun_jobs(client, [*self.ASKS])
        engine = engine_of(worker)

        worker.signal_worker(signal.SIGUSR1)
        worker.wait_for_line('"event": "sequences"')
        os.killpg(engine.pid, signal.SIGTERM)  # as a supervisor that signals all processes of its group
        worker.signal(signal.SIGTERM)

        assert worker.wait() == ExitCode.DONE
        assert not engine.is_running()
        assert "error" not in worker.output.replace('"error_code"', "")
        check_every_token_once(client, dict(zip(job_ids, self.ASKS, strict=True)))
        check_nothing_is_left(client)
