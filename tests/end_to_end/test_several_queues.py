"""One worker process that serves two queues, three parts to one: real kills, a real history."""

import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from sluice.protocol.calls import inspect
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.wire import JobId, JobOptions
from tests.end_to_end.processes import WorkerPool, worker_pool
from tests.end_to_end.test_worker_records import rows_of
from tests.integration.jobs import (
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    num_on_channel,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.servers import RedisServer

CHAT, BATCH = QueueKeys("chat"), QueueKeys("batch")
SETTINGS = {"QUEUE": "chat:3 batch:1", "MAX_NUM_SEQS": "4"}
FEW = 10
"""Pulls of two queues may be apart by four places, each of one job."""


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        for keys in (CHAT, BATCH):
            client.hset(keys.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path, client: Any) -> Generator[WorkerPool]:
    del client
    with worker_pool(valkey.url, tmp_path) as made:
        yield made


def asks(count: int, *, tokens: int = 8) -> list[Ask]:
    return [Ask(prompt=f"job {i}", options=JobOptions(max_tokens=tokens), seed=i) for i in range(count)]


def num_waiting(client: Any, keys: QueueKeys) -> int:
    return run(client, inspect(keys)).waiting_jobs


class TestGivenTwoQueuesWithMoreThanItRuns:
    def test_when_both_wait_then_jobs_are_taken_by_weight(self, workers: WorkerPool, client: Any) -> None:
        chat, batch = submit_all(client, asks(150), keys=CHAT), submit_all(client, asks(150), keys=BATCH)

        workers.start_all(1, **SETTINGS)
        wait_until(lambda: num_waiting(client, CHAT) <= 30, "most of chat is taken")
        taken = len(batch) - num_waiting(client, BATCH)

        assert abs(taken - 120 / 3) <= FEW, "both still wait"
        wait_for_ends(client, chat, keys=CHAT)
        wait_for_ends(client, batch, keys=BATCH)
        assert num_waiting(client, CHAT) == num_waiting(client, BATCH) == 0

    def test_when_it_is_killed_then_another_continues_the_jobs_of_both(
        self, workers: WorkerPool, client: Any, tmp_path: Path
    ) -> None:
        path = tmp_path / "history.db"
        both = asks(6, tokens=60)
        settings = {**SETTINGS, "MAX_NUM_SEQS": "8", "RECORDER": "true", "DATABASE_URL": f"sqlite:///{path}"}
        first = workers.start_all(1, **settings)[0]
        jobs = {keys: submit_all(client, both, keys=keys) for keys in (CHAT, BATCH)}
        wait_until(lambda: all(num_on_channel(client, jobs[keys][0], keys=keys) >= 5 for keys in jobs), "both speak")

        first.signal_worker(signal.SIGKILL)
        workers.start_all(1, **settings)

        for keys, job_ids in jobs.items():
            wait_for_ends(client, job_ids, keys=keys)
            check_every_token_once(client, dict(zip(job_ids, both, strict=True)), keys=keys)
            check_nothing_is_left(client, keys=keys)
        queue_of: dict[JobId, str] = {job_id: keys.queue for keys, job_ids in jobs.items() for job_id in job_ids}
        wait_until(lambda: done_in(path) == queue_of, "the history has the jobs of both queues")

    def test_when_one_has_no_jobs_then_the_other_has_all_places(self, workers: WorkerPool, client: Any) -> None:
        workers.start_all(1, **SETTINGS)

        batch = submit_all(client, asks(8, tokens=200), keys=BATCH)

        wait_until(lambda: all(num_on_channel(client, one, keys=BATCH) for one in batch[:4]), "four run")
        wait_for_ends(client, batch, keys=BATCH)

    def test_when_it_is_stopped_then_it_leaves_both(self, workers: WorkerPool, client: Any) -> None:
        worker = workers.start_all(1, **SETTINGS)[0]

        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0

        assert [client.zcard(keys.key("alive")) for keys in (CHAT, BATCH)] == [0, 0]


def done_in(path: Path) -> dict[str, str]:
    """The queue of each job that is done, by its id."""
    return {job_id: row["queue"] for job_id, row in rows_of(path).items() if row["state"] == "done"}
