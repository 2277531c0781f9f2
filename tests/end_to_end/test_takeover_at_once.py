"""A worker process ends without a word: its parent reports it, and another worker continues at once.

Heartbeats are valid for longer than any test waits, so only a report can move jobs.
"""

import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.protocol.wire import JobId, JobOptions
from tests.end_to_end.processes import WorkerPool, WorkerProcess, worker_pool
from tests.grids import fast_only
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    field_of,
    num_on_channel,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.servers import RedisServer

LONG_LIFE = {"BEAT_EVERY_S": "0.5", "BEAT_LIFE_S": "600", "MAX_NUM_SEQS": "4"}


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:  # Any: redis-py's clients share no typed base
    with valkey.client() as client:
        yield client


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path) -> Generator[WorkerPool]:
    with worker_pool(valkey.url, tmp_path, WorkerProcess) as made:
        yield made


def attempts(client: Any, job_ids: list[JobId]) -> set[int]:
    return {int(field_of(client, one, "attempt") or 0) for one in job_ids}


class TestGivenTwoWorkersWithRoom:
    """Redis has just started: without a report, nobody may be declared dead yet either."""

    @pytest.mark.parametrize(
        "number", fast_only([signal.SIGKILL], [signal.SIGSEGV, signal.SIGABRT]), ids=lambda one: one.name
    )
    def test_when_the_one_with_jobs_is_killed_then_the_other_continues(
        self, workers: WorkerPool, client: Any, number: signal.Signals
    ) -> None:
        asks = [Ask(options=JobOptions(max_tokens=120), seed=i) for i in range(6)]
        first, _ = workers.start_all(2, **LONG_LIFE)
        job_ids = submit_all(client, asks)
        wait_until(lambda: all(num_on_channel(client, one) >= 10 for one in job_ids), "all jobs speak")

        first.signal_worker(number)

        assert first.wait() == 128 + number
        wait_for_ends(client, job_ids)
        check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
        check_nothing_is_left(client)
        assert attempts(client, job_ids) == {1, 2}, "only the dead one's moved"
        assert client.hget(KEYS.key("counters"), "worker_deaths") == b"1"

    def test_when_a_library_ends_the_process_then_the_other_continues(self, workers: WorkerPool, client: Any) -> None:
        asks = [Ask(prompt="[[exit@10x1]]", options=JobOptions(max_tokens=60)), Ask(options=JobOptions(max_tokens=60))]
        # With an engine process that is what would end, which breaks the worker.
        obedient = {**LONG_LIFE, "MODEL": "null?step_s=0.01&obey_prompts=1", "ENGINE_PROCESS": "off"}
        first = workers.start_all(1, **obedient)[0]
        job_ids = submit_all(client, asks)

        assert first.wait() == 0
        workers.start_all(1, **obedient)
        wait_for_ends(client, job_ids)

        check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
        assert client.hget(KEYS.key("counters"), "worker_deaths") == b"1"


class TestGivenAWorkerAlone:
    def test_when_killed_and_restarted_by_its_supervisor_then_the_new_one_continues(
        self, workers: WorkerPool, client: Any
    ) -> None:
        ask = Ask(options=JobOptions(max_tokens=100))
        first = workers.start_all(1, **LONG_LIFE)[0]
        (job_id,) = submit_all(client, [ask])
        wait_until(lambda: num_on_channel(client, job_id) >= 10, "it speaks")

        first.signal_worker(signal.SIGKILL)
        first.wait()
        workers.start(**LONG_LIFE)
        wait_for_ends(client, [job_id])

        check_every_token_once(client, {job_id: ask})

    @pytest.mark.long
    def test_when_redis_is_away_at_its_death_then_the_parent_ends_all_the_same(
        self, durable_valkey: RedisServer, tmp_path: Path
    ) -> None:
        with worker_pool(durable_valkey.url, tmp_path, WorkerProcess) as workers:
            worker = workers.start_all(1, **LONG_LIFE)[0]
            durable_valkey.stop()

            worker.signal_worker(signal.SIGKILL)

            assert worker.wait() == 128 + signal.SIGKILL
            assert "Traceback" not in worker.output

    @pytest.mark.long
    def test_when_redis_stands_still_then_the_parent_waits_for_it_briefly(
        self, durable_valkey: RedisServer, tmp_path: Path
    ) -> None:
        with worker_pool(durable_valkey.url, tmp_path, WorkerProcess) as workers:
            worker = workers.start_all(1, **LONG_LIFE)[0]
            durable_valkey.freeze()
            try:
                worker.signal_worker(signal.SIGKILL)

                assert worker.wait() == 128 + signal.SIGKILL
            finally:
                durable_valkey.thaw()

    def test_when_its_parent_is_killed_then_it_finishes_its_jobs_and_leaves(
        self, workers: WorkerPool, client: Any
    ) -> None:
        ask = Ask(options=JobOptions(max_tokens=100))
        worker = workers.start_all(1, **LONG_LIFE)[0]
        (job_id,) = submit_all(client, [ask])
        wait_until(lambda: num_on_channel(client, job_id) >= 10, "it speaks")

        worker.signal(signal.SIGKILL)
        wait_for_ends(client, [job_id])

        check_every_token_once(client, {job_id: ask})
        assert attempts(client, [job_id]) == {1}
        wait_until(lambda: client.zcard(KEYS.key("alive")) == 0, "it deregistered")

    def test_when_it_runs_then_its_parent_has_not_loaded_what_it_needs(self, workers: WorkerPool) -> None:
        worker = workers.start_all(1, **LONG_LIFE)[0]

        maps = {Path(one.path).name for one in psutil.Process(worker.process.pid).memory_maps()}

        assert not [name for name in maps if "torch" in name or "numpy" in name or "tokenizers" in name]
