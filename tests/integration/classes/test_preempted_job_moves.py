"""A job that gave way on one worker goes on exactly on another one that is idle: real processes."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from sluice.protocol.calls import cancel, status
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobOptions
from tests.end_to_end.processes import WorkerPool, worker_pool
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    num_on_channel,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.servers import RedisServer

SLOW = "null?step_s=0.02"
BATCH = Ask(options=JobOptions(max_tokens=150), seed=3, stream=False)
BATCH_LONG = Ask(options=JobOptions(max_tokens=8_000), stream=False)
LONG = Ask(prompt="now", options=JobOptions(max_tokens=8_000), priority=9)


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path, client: Any) -> Generator[WorkerPool]:
    del client
    with worker_pool(valkey.url, tmp_path) as made:
        yield made


def owner_of(client: Any, job_id: JobId) -> str:
    (view,) = run(client, status(KEYS, [job_id]))
    assert view is not None
    return view.owner or ""


class TestGivenAWorkerThatPreemptedAJob:
    """It has one place, which a job of class 9 took from one of class 0. No one else waits."""

    def test_when_another_worker_is_idle_then_it_goes_on_there_at_the_next_token(
        self, workers: WorkerPool, client: Any
    ) -> None:
        (first,) = workers.start_all(1, MODEL=SLOW, MAX_NUM_SEQS="1")
        (batch,) = submit_all(client, [BATCH])
        wait_until(lambda: num_on_channel(client, batch), "it generates")
        (urgent,) = submit_all(client, [LONG])
        wait_until(lambda: num_on_channel(client, urgent), "it gives way")

        (second,) = workers.start_all(1, MODEL=SLOW, MAX_NUM_SEQS="1")
        wait_until(lambda: owner_of(client, batch).startswith(second.incarnation), "the second has it")
        wait_for_ends(client, [batch])

        assert owner_of(client, urgent).startswith(first.incarnation), first.output + second.output
        check_every_token_once(client, {batch: BATCH})
        (view,) = run(client, status(KEYS, [batch]))
        assert view is not None
        assert (view.attempt, view.failures, view.deaths) == (2, 0, ())
        run(client, cancel(KEYS, [urgent]))
        wait_until(lambda: owner_of(client, urgent) == "", "it ends")

    def test_when_none_is_idle_then_it_waits_where_its_prefix_is_cached(self, workers: WorkerPool, client: Any) -> None:
        (first,) = workers.start_all(1, MODEL=SLOW, MAX_NUM_SEQS="1")
        (batch,) = submit_all(client, [BATCH])
        wait_until(lambda: num_on_channel(client, batch), "it generates")
        (urgent,) = submit_all(client, [Ask(options=JobOptions(max_tokens=150), priority=9)])

        wait_for_ends(client, [urgent, batch])

        (view,) = run(client, status(KEYS, [batch]))
        assert view is not None
        assert (view.state, view.attempt) == (JobState.DONE, 1)
        assert "jobs handed back" not in first.output
        check_every_token_once(client, {batch: BATCH})


class TestGivenAWorkerThatPreemptedFourJobs:
    """Four of class 9 have its places. Nothing waits on the queue."""

    def test_when_a_worker_with_one_place_is_idle_then_one_of_them_goes_there(
        self, workers: WorkerPool, client: Any
    ) -> None:
        (first,) = workers.start_all(1, MODEL=SLOW, MAX_NUM_SEQS="4")
        batch = submit_all(client, [BATCH_LONG] * 4)
        wait_until(lambda: all(num_on_channel(client, one) for one in batch), "they generate")
        urgent = submit_all(client, [LONG] * 4)
        wait_until(lambda: all(num_on_channel(client, one) for one in urgent), "they give way")

        (second,) = workers.start_all(1, MODEL=SLOW, MAX_NUM_SEQS="1")
        wait_until(lambda: "jobs handed back" in first.output, "the first hands over")
        wait_until(lambda: any(owner_of(client, one).startswith(second.incarnation) for one in batch), "it is taken")

        owners = [owner_of(client, one)[: len(first.incarnation)] for one in batch]
        assert sorted(owners) == sorted([*[first.incarnation] * 3, second.incarnation])
        (line,) = [line for line in first.output.splitlines() if "jobs handed back" in line]
        assert "idle worker" in line
        assert second.incarnation in line
        run(client, cancel(KEYS, [*urgent, *batch]))
        wait_until(lambda: not any(owner_of(client, one) for one in [*urgent, *batch]), "all end")
