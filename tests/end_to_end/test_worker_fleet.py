"""Several worker processes under one parent: one is killed, its jobs continue, a new one comes; all leave together."""

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.protocol.states import JobState
from sluice.protocol.wire import JobOptions
from sluice.worker.serve.forks import NAME
from tests.end_to_end.processes import WorkerPool, WorkerProcess, worker_pool
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
def fleets(valkey: RedisServer, tmp_path: Path, client: Any) -> Generator[WorkerPool]:
    del client
    with worker_pool(valkey.url, tmp_path, WorkerProcess) as made:
        yield made


def logged_by(log: str, name: str, event: str) -> list[dict[str, Any]]:
    """Return one worker's log lines of an event."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [line for line in lines if (line.get("name"), line["event"]) == (name, event)]


class TestGivenAFleetOfTwoOnTheCpu:
    """Each has jobs in mid-generation, 10 ms a token."""

    def test_when_one_is_killed_then_jobs_resume_it_restarts_and_all_stop_on_a_signal(
        self, fleets: WorkerPool, client: Any
    ) -> None:
        # The parent reports the death. No other life ends, however busy this machine is.
        fleet = fleets.start(PROCESSES="2", MAX_NUM_SEQS="8", METRICS="true", METRICS_PORT="0", BEAT_LIFE_S="30")
        wait_until(lambda: fleet.output.count('"event": "worker started"') == 2, "both have started")
        asks = [Ask(prompt=f"job {i}", options=JobOptions(max_tokens=150), seed=i) for i in range(16)]
        job_ids = submit_all(client, asks)
        wait_until(lambda: all(num_on_channel(client, one) >= 10 for one in job_ids), "all jobs speak")
        (first,) = logged_by(fleet.output, "cpu0", "worker process started")
        (ready,) = logged_by(fleet.output, "cpu0", "worker started")
        held = client.hlen(KEYS.key(f"held:{_incarnation(client, ready['worker_id'])}"))

        os.kill(first["pid"], signal.SIGKILL)
        wait_until(lambda: len(logged_by(fleet.output, "cpu0", "worker started")) == 2, "a new one has come")
        wait_for_ends(client, job_ids)

        assert held > 0, "it had jobs"
        check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
        check_nothing_is_left(client)
        assert {int(field_of(client, one, "attempt") or 0) for one in job_ids} == {1, 2}, "only the dead one's moved"
        assert logged_by(fleet.output, "cpu0", "worker process died; restarting")[0]["exit_code"] == -signal.SIGKILL
        ports = [logged_by(fleet.output, name, "metrics served")[0]["port"] for name in ("cpu0", "cpu1")]
        assert len(set(ports)) == 2

        fleet.signal(signal.SIGTERM)
        assert fleet.wait() == 0, fleet.output
        assert client.zcard(KEYS.key("alive")) == 0, "both deregistered"

    def test_when_the_parent_is_killed_then_the_workers_finish_what_they_have_and_go(
        self, fleets: WorkerPool, client: Any
    ) -> None:
        fleet = fleets.start(PROCESSES="2", BEAT_LIFE_S="30")
        wait_until(lambda: fleet.output.count('"event": "worker started"') == 2, "both have started")
        asks = [Ask(prompt=f"job {i}", options=JobOptions(max_tokens=60), seed=i) for i in range(4)]
        job_ids = submit_all(client, asks)
        wait_until(lambda: all(num_on_channel(client, one) >= 5 for one in job_ids), "all jobs speak")

        fleet.signal(signal.SIGKILL)
        wait_for_ends(client, job_ids)

        wait_until(lambda: client.zcard(KEYS.key("alive")) == 0, "both deregistered")
        check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
        assert {int(field_of(client, one, "attempt") or 0) for one in job_ids} == {1}


class TestGivenTheProcessThatForksTheWorkersOfAFleet:
    @pytest.fixture
    def fleet(self, fleets: WorkerPool) -> WorkerProcess:
        made = fleets.start(PROCESSES="2")
        wait_until(lambda: made.output.count('"event": "worker started"') == 2, "both have started")
        return made

    def test_when_a_worker_is_started_then_it_is_a_fork_with_its_own_session_and_environment(
        self, fleet: WorkerProcess
    ) -> None:
        workers = [psutil.Process(pid) for pid in fleet.pids_of("worker")]

        assert [(one.name(), one.ppid()) for one in workers] == [(NAME, fleet.parent_pid)] * 2
        assert all(os.getsid(one.pid) == one.pid for one in workers)
        assert len(forkers(fleet)) == 1
        assert {line["name"] for line in lines_of(fleet, "worker started")} == {"cpu0", "cpu1"}

    def test_when_a_worker_that_served_is_killed_then_the_next_is_forked_at_once(self, fleet: WorkerProcess) -> None:
        killed = fleet.pid
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len(lines_of(fleet, "worker started")) == 3, "a new one has come")

        (died,) = lines_of(fleet, "worker process died; restarting")
        assert (died["exit_code"], died["retry_in_s"]) == (-signal.SIGKILL, 0.0)
        assert psutil.Process(fleet.pid).name() == NAME

    def test_when_it_is_killed_then_workers_stay_and_the_next_are_started_without_it(
        self, fleet: WorkerProcess
    ) -> None:
        before = fleet.pids_of("worker")
        (forker,) = forkers(fleet)
        forker.kill()
        fleet.wait_for_line("process that forks workers ended")
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(lines_of(fleet, "worker started")) == 3, "a new one has come")
        wait_until(lambda: len(forkers(fleet)) == 1, "the next one is prepared meanwhile")

        assert fleet.pids_of("worker")[0] == before[1]
        fleet.signal(signal.SIGTERM)
        assert fleet.wait() == 0, fleet.output

    def test_when_the_parent_is_killed_then_it_ends(self, fleet: WorkerProcess) -> None:
        (forker,) = forkers(fleet)

        fleet.signal(signal.SIGKILL)

        assert psutil.wait_procs([forker], timeout=20)[1] == []


def forkers(fleet: WorkerProcess) -> list[psutil.Process]:
    """The processes that fork its workers."""
    children = psutil.Process(fleet.parent_pid).children()
    return [one for one in children if "--forks" in one.cmdline() and one.name() != NAME]


def lines_of(fleet: WorkerProcess, event: str) -> list[dict[str, Any]]:
    """Its log lines of an event."""
    lines = [json.loads(line) for line in fleet.output.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


class TestGivenAFleetWhoseWorkersStillStart:
    """They wait for Redis, which is down."""

    @pytest.fixture
    def starting(self, durable_valkey: RedisServer, tmp_path: Path) -> Generator[WorkerProcess]:
        durable_valkey.stop()
        with worker_pool(durable_valkey.url, tmp_path, WorkerProcess) as made:
            fleet = made.start(PROCESSES="2")
            wait_until(lambda: fleet.output.count('"event": "waiting for redis"') == 2, "both wait")
            yield fleet

    def test_when_it_is_quieted_meanwhile_then_both_begin_quiet_and_pull_once_continued(
        self, starting: WorkerProcess, durable_valkey: RedisServer
    ) -> None:
        ask = Ask(options=JobOptions(max_tokens=5))
        starting.signal(signal.SIGTSTP)

        durable_valkey.start()

        wait_until(
            lambda: starting.output.count('"event": "quiet: pulling no more"') == 2, "both have begun, and say so"
        )
        with durable_valkey.client() as client:
            (job_id,) = submit_all(client, [ask])
            starting.signal(signal.SIGUSR1)
            wait_until(lambda: starting.output.count('"event": "sequences"') == 2, "both have had the time to pull")
            assert state_of(client, job_id) is JobState.QUEUED
            starting.signal(signal.SIGCONT)
            wait_for_ends(client, [job_id])
            check_every_token_once(client, {job_id: ask})

    @pytest.mark.long
    def test_when_ctrl_c_comes_then_it_ends_as_asked(self, starting: WorkerProcess) -> None:
        starting.signal(signal.SIGINT)

        assert starting.wait() == 0, starting.output


def _incarnation(client: Any, beginning: str) -> str:
    alive = [name.decode() for name in client.zrange(KEYS.key("alive"), 0, -1)]
    return next(name for name in alive if name.startswith(beginning))
