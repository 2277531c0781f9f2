"""Real worker processes, killed, stopped, drained; an outside checker finds every token once."""

import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from sluice.protocol.states import JobState
from sluice.protocol.wire import JobOptions
from tests.end_to_end.processes import WorkerPool, worker_pool
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    field_of,
    num_on_channel,
    state_of,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.servers import RedisServer


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        # A server refuses reclaim until it has been up for a lifetime; the tests' queue lives an hour later.
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path, client: Any) -> Generator[WorkerPool]:
    del client
    with worker_pool(valkey.url, tmp_path) as made:
        yield made


def long_jobs(count: int, *, tokens: int = 120) -> list[Ask]:
    return [Ask(prompt=f"job {i}", options=JobOptions(max_tokens=tokens, n=1 + i % 2), seed=i) for i in range(count)]


class TestGivenTwoWorkers:
    """Each has jobs in mid-generation, 10 ms a token."""

    def test_when_one_is_killed_then_the_other_goes_on_at_the_next_token(
        self, workers: WorkerPool, client: Any
    ) -> None:
        asks = long_jobs(12)
        # Neither has places for all of their 18 choices.
        first, _ = workers.start_all(2, MAX_NUM_SEQS="10")
        job_ids = submit_all(client, asks)
        wait_until(lambda: all(num_on_channel(client, one) >= 20 for one in job_ids), "all jobs speak")

        first.signal_worker(signal.SIGKILL)
        wait_for_ends(client, job_ids)

        check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
        check_nothing_is_left(client)
        attempts = [int(field_of(client, one, "attempt") or 0) for one in job_ids]
        assert set(attempts) == {1, 2}, "some were the dead worker's, some were not"

    def test_when_one_is_stopped_past_its_lifetime_then_its_late_writes_are_refused(
        self, workers: WorkerPool, client: Any
    ) -> None:
        asks = long_jobs(6, tokens=150)
        zombie = workers.start_all(1)[0]
        job_ids = submit_all(client, asks)
        wait_until(lambda: all(num_on_channel(client, one) >= 10 for one in job_ids), "all jobs speak")

        zombie.signal_worker(signal.SIGSTOP)
        workers.start_all(1)
        wait_until(lambda: all(int(field_of(client, one, "epoch") or 0) == 2 for one in job_ids), "all are taken over")
        zombie.signal_worker(signal.SIGCONT)
        zombie.wait_for_line("job lost")
        wait_for_ends(client, job_ids)

        check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
        check_nothing_is_left(client)

    def test_when_one_must_hand_over_then_the_other_continues(self, workers: WorkerPool, client: Any) -> None:
        asks = long_jobs(8, tokens=100)
        leaver = workers.start_all(1, DRAIN="hand-over")[0]
        job_ids = submit_all(client, asks)
        wait_until(lambda: all(num_on_channel(client, one) >= 10 for one in job_ids), "all jobs speak")
        workers.start_all(1)

        leaver.signal(signal.SIGTERM)
        assert leaver.wait() == 0
        wait_for_ends(client, job_ids)

        check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
        check_nothing_is_left(client)


class TestGivenOneWorkerWithMoreThanItRuns:
    """Two run, others wait in the queue."""

    def test_when_stopped_then_it_finishes_what_runs_and_leaves_the_rest(
        self, workers: WorkerPool, client: Any
    ) -> None:
        asks = long_jobs(6, tokens=40)
        worker = workers.start_all(1, MAX_NUM_SEQS="2")[0]
        job_ids = submit_all(client, asks)
        wait_until(lambda: num_on_channel(client, job_ids[0]) >= 3, "it runs")

        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0

        states = [state_of(client, one) for one in job_ids]
        assert states[0] is JobState.DONE
        assert states[-1] is JobState.QUEUED
        assert set(states) == {JobState.DONE, JobState.QUEUED}
        assert client.zcard(KEYS.key("alive")) == 0, "it deregistered"
        workers.start_all(1)
        wait_for_ends(client, job_ids)
        check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))

    def test_when_asked_twice_then_it_hands_everything_back_at_once(self, workers: WorkerPool, client: Any) -> None:
        ask = Ask(options=JobOptions(max_tokens=3000))
        worker = workers.start_all(1)[0]
        (job_id,) = submit_all(client, [ask])
        wait_until(lambda: num_on_channel(client, job_id) >= 3, "it runs")

        worker.signal(signal.SIGTERM)
        worker.wait_for_line("draining")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0

        assert state_of(client, job_id) is JobState.QUEUED
        assert num_on_channel(client, job_id) < 3000

    def test_when_quieted_then_it_takes_nothing_until_continued(self, workers: WorkerPool, client: Any) -> None:
        ask = Ask(options=JobOptions(max_tokens=5))
        worker = workers.start_all(1)[0]
        worker.signal(signal.SIGTSTP)
        worker.wait_for_line("quiet: pulling no more")
        (job_id,) = submit_all(client, [ask])
        worker.signal(signal.SIGUSR1)
        worker.wait_for_line('"event": "sequences"')
        assert state_of(client, job_id) is JobState.QUEUED

        worker.signal(signal.SIGCONT)
        wait_for_ends(client, [job_id])

        check_every_token_once(client, {job_id: ask})


class TestGivenARedisThatGoesAwayForGood:
    @pytest.mark.long
    def test_when_stopped_then_the_worker_ends_in_time_all_the_same(
        self, durable_valkey: RedisServer, tmp_path: Path
    ) -> None:
        ask = Ask(options=JobOptions(max_tokens=3000))
        client: Any = durable_valkey.client()  # redis-py types it in part
        with client, worker_pool(durable_valkey.url, tmp_path) as workers:
            worker = workers.start_all(1, DRAIN_TIMEOUT_S="0.3")[0]
            (job_id,) = submit_all(client, [ask])
            wait_until(lambda: num_on_channel(client, job_id) >= 3, "it runs")
            durable_valkey.kill()
            worker.wait_for_line("redis unreachable")

            worker.signal(signal.SIGTERM)

            assert worker.wait() == 0
            assert "deregistration not answered" in worker.output


class TestGivenARedisThatRestarts:
    """It keeps an append-only file; one worker has jobs in mid-generation."""

    def test_when_it_comes_back_then_the_same_worker_goes_on_and_no_lease_moved(
        self, durable_valkey: RedisServer, tmp_path: Path
    ) -> None:
        asks = long_jobs(6, tokens=200)
        client: Any = durable_valkey.client()  # redis-py types it in part
        with client, worker_pool(durable_valkey.url, tmp_path) as workers:
            # Appended at once: the test is about leases, not about a lost second.
            client.config_set("appendfsync", "always")
            first, second = workers.start_all(2)
            job_ids = submit_all(client, asks)
            wait_until(lambda: all(num_on_channel(client, one) >= 10 for one in job_ids), "all jobs speak")

            durable_valkey.kill()
            time.sleep(0.5)  # a server that is back within a round trip's retries is an outage that nobody notices
            durable_valkey.start()
            wait_for_ends(client, job_ids)

            check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
            check_nothing_is_left(client)
            assert {int(field_of(client, one, "attempt") or 0) for one in job_ids} == {1}
            assert "redis unreachable" in first.output + second.output
            for worker in (first, second):
                wait_until(lambda count=worker.outages: count()[0] == count()[1], "each outage that it noticed is over")
