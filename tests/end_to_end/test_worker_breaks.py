"""Workers that break: by the model, by a hung step, by a foreign key. The exit code, and the fate of jobs."""

import json
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from sluice.protocol.states import JobState
from sluice.protocol.wire import JobOptions
from sluice.worker.errors import ExitCode
from tests.end_to_end.processes import WorkerPool, WorkerProcess, worker_pool
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    num_on_channel,
    read_channel,
    state_of,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.servers import RedisServer

FAULTY = "null?step_s=0.005&obey_prompts=1"
GOOD = Ask(options=JobOptions(max_tokens=60))


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path, client: Any) -> Generator[WorkerPool]:
    del client
    with worker_pool(valkey.url, tmp_path, WorkerProcess) as made:
        yield made


class TestGivenAModelThatLosesItsDevice:
    def test_when_it_happens_then_the_worker_asks_for_a_restart_and_its_jobs_continue(
        self, workers: WorkerPool, client: Any
    ) -> None:
        losing = Ask(prompt="[[lose@20x1]]", options=JobOptions(max_tokens=60))
        worker = workers.start_all(1, MODEL=FAULTY)[0]
        job_ids = submit_all(client, [losing, GOOD])

        assert worker.wait() == ExitCode.BROKEN
        assert {state_of(client, one) for one in job_ids} == {JobState.QUEUED}, "handed back at once"
        assert '"event": "worker broken"' in worker.output
        workers.start_all(1, MODEL=FAULTY)
        wait_for_ends(client, job_ids)

        check_every_token_once(client, dict(zip(job_ids, [losing, GOOD], strict=True)))

    @pytest.mark.long
    def test_when_a_job_does_it_each_time_then_it_is_given_up_and_its_mate_completes(
        self, workers: WorkerPool, client: Any
    ) -> None:
        losing = Ask(prompt="[[lose@3]]", options=JobOptions(max_tokens=60))
        losing_id, good_id = submit_all(client, [losing, GOOD])
        num_starts = 0
        while state_of(client, losing_id) is not JobState.FAILED:
            num_starts += 1
            assert num_starts <= 6, "it would never end"
            assert workers.start_all(1, MODEL=FAULTY)[0].wait() == ExitCode.BROKEN
        workers.start_all(1, MODEL=FAULTY)
        wait_for_ends(client, [good_id])

        last = read_channel(client, losing_id)[-1]
        assert last.end is not None
        assert (last.start, last.end.error_code) == (3, "killed_its_worker")
        check_every_token_once(client, {good_id: GOOD})


class TestGivenAJobWithLogitsThatAreNotNumbers:
    def test_when_it_runs_then_it_alone_fails_after_the_tokens_it_has(self, workers: WorkerPool, client: Any) -> None:
        bad = Ask(prompt="[[nan@7]]", options=JobOptions(max_tokens=60))
        workers.start_all(1, MODEL=FAULTY)

        bad_id, good_id = submit_all(client, [bad, GOOD])
        wait_for_ends(client, [bad_id, good_id])

        assert state_of(client, bad_id) is JobState.FAILED
        last = read_channel(client, bad_id)[-1]
        assert last.end is not None
        assert (last.start, last.end.error_code) == (7, "bad_logits")
        check_every_token_once(client, {good_id: GOOD})


class TestGivenAStepThatHangs:
    def test_when_its_deadline_has_passed_then_others_take_its_jobs_and_it_ends(
        self, workers: WorkerPool, client: Any
    ) -> None:
        hanging = Ask(prompt="[[hang@10x1]]", options=JobOptions(max_tokens=30))
        hung = workers.start_all(1, MODEL=FAULTY, STEP_DEADLINE_S="0.5")[0]
        (job_id,) = submit_all(client, [hanging])
        wait_until(lambda: num_on_channel(client, job_id) == 10, "it hangs")

        workers.start_all(1, MODEL=FAULTY)
        wait_for_ends(client, [job_id])

        check_every_token_once(client, {job_id: hanging})
        assert hung.wait() == ExitCode.BROKEN
        assert "step outlasted its deadline" in hung.output
        check_nothing_is_left(client)

    @pytest.mark.long
    def test_when_it_is_asked_to_stop_then_it_ends_within_a_limit(self, workers: WorkerPool, client: Any) -> None:
        hanging = Ask(prompt="[[hang@10x1]]", options=JobOptions(max_tokens=30))
        # A step in another process does not keep the worker from stopping.
        settings = {"STEP_DEADLINE_S": "600", "DRAIN_TIMEOUT_S": "0.1", "ENGINE_PROCESS": "off"}
        hung = workers.start_all(1, MODEL=FAULTY, **settings)[0]
        (job_id,) = submit_all(client, [hanging])
        wait_until(lambda: num_on_channel(client, job_id) == 10, "it hangs")

        hung.signal(signal.SIGTERM)

        assert hung.wait() == ExitCode.BROKEN
        assert "shutdown outlasted its limit" in hung.output
        workers.start_all(1, MODEL=FAULTY)
        wait_for_ends(client, [job_id])
        check_every_token_once(client, {job_id: hanging})


class TestGivenAnotherProgramsKey:
    """A key of the queue is of the wrong type."""

    def test_when_started_then_it_says_which(self, workers: WorkerPool, client: Any) -> None:
        client.set(KEYS.key("outbox"), "mine")

        worker = workers.start()

        assert worker.wait() == ExitCode.MISUSED
        assert "outbox is a string and must be a stream" in worker.output
        assert "Traceback" not in worker.output

    def test_when_it_comes_while_serving_then_the_worker_gives_up_and_is_restarted(
        self, workers: WorkerPool, client: Any
    ) -> None:
        worker = workers.start_all(1)[0]
        client.delete(KEYS.key("bell"))
        client.set(KEYS.key("bell"), "mine")

        assert worker.wait() == ExitCode.BROKEN
        # A traceback is a field of a log line, never lines of its own.
        lines = [json.loads(line) for line in worker.output.splitlines()]
        assert sum("exception" in line for line in lines) == 1
