"""`worker fleet FILE` with real workers that take turns on one device: switches, kills amid them, resumed jobs."""

import json
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sluice.producer import Producer
from sluice.protocol.calls import inspect, list_workers
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobOptions
from sluice.protocol.workers import WAITING_FOR_ITS_TURN
from sluice.worker.errors import ExitCode
from sluice.worker.model.folders import SMALL_MODEL
from tests.end_to_end.processes import WorkerProcess
from tests.gateway.gateway_process import gateway_process
from tests.integration.jobs import (
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

pytestmark = pytest.mark.slow

FIRST, SECOND = QueueKeys("first"), QueueKeys("second")
FILE = """
[workers.first]
model = "null?step_s=0.01"
queue = "first"
turns = "card"
[workers.second]
model = "null?step_s=0.004"
queue = "second"
turns = "card"
[turns.card]
share = 1
patience-s = 0.2
turn-s = 0
"""
LONG_ASK = Ask(prompt="long", options=JobOptions(max_tokens=200), seed=3)
SHORT_ASK = Ask(prompt="short", options=JobOptions(max_tokens=20), seed=4, model="null")

NUM_JOBS = 30

StartFleet = Callable[[str], WorkerProcess]


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        for keys in (FIRST, SECOND):
            # A server refuses reclaim until it has been up for a lifetime; these queues live an hour later.
            client.hset(keys.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


@pytest.fixture
def start(valkey: RedisServer, tmp_path: Path, client: Any) -> Generator[StartFleet]:
    """Starts the fleet of a file."""
    del client
    made: list[WorkerProcess] = []
    file = tmp_path / "fleet.toml"

    class Fleet(WorkerProcess):
        COMMAND: ClassVar[tuple[str, ...]] = ("fleet", str(file))

    def start_fleet(text: str) -> WorkerProcess:
        file.write_text(text)
        # No life ends by itself, however busy this machine is.
        made.append(Fleet(valkey.url, tmp_path / "log", SLUICE_BEAT_LIFE_S="30", SLUICE_MODEL="null"))
        return made[-1]

    yield start_fleet
    for fleet in made:
        fleet.kill()


def states(client: Any, keys: QueueKeys) -> list[str]:
    """The states of a queue's workers, as their heartbeats say."""
    return [about["state"] for about in run(client, list_workers(keys)).workers.values()]


def events(log: str, *names: str) -> list[str]:
    """The lines of a log that have these events, in order."""
    found = [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]
    return [event for event in found if event in names]


class TestGivenTwoModelsThatTakeTurns:
    def test_when_jobs_come_for_both_then_one_worker_runs_at_a_time_and_no_token_changes(
        self, start: StartFleet, client: Any
    ) -> None:
        fleet = start(FILE)
        wait_until(lambda: states(client, FIRST) == ["pulling"], "the first has its turn")
        assert states(client, SECOND) == [WAITING_FOR_ITS_TURN]
        assert run(client, inspect(SECOND)).models == ("null",)
        (long,) = submit_all(client, [LONG_ASK], keys=FIRST)
        wait_until(lambda: num_on_channel(client, long, keys=FIRST) >= 10, "it speaks")

        (short,) = submit_all(client, [SHORT_ASK], keys=SECOND)

        wait_for_ends(client, [short], keys=SECOND)
        assert state_of(client, long, keys=FIRST) is JobState.QUEUED
        wait_for_ends(client, [long], keys=FIRST)
        check_every_token_once(client, {long: LONG_ASK}, keys=FIRST)
        check_every_token_once(client, {short: SHORT_ASK}, keys=SECOND)
        for keys in (FIRST, SECOND):
            check_nothing_is_left(client, keys=keys)
        began, ended = "worker process started", "worker process ended"
        assert events(fleet.output, began, ended) == [began, ended, began, ended, began]
        fleet.signal(signal.SIGTERM)
        assert fleet.wait() == ExitCode.DONE, fleet.output
        assert [states(client, keys) for keys in (FIRST, SECOND)] == [[], []]

    @pytest.mark.long
    def test_when_the_present_worker_is_killed_amid_jobs_of_both_then_no_token_changes(
        self, start: StartFleet, client: Any
    ) -> None:
        fleet = start(FILE.replace("patience-s = 0.2", "patience-s = 2"))
        wait_until(lambda: states(client, FIRST) == ["pulling"], "the first has its turn")
        asks = [Ask(prompt=f"job {i}", options=JobOptions(max_tokens=300), seed=i) for i in range(6)]
        first = submit_all(client, asks, keys=FIRST)
        second = submit_all(client, asks, keys=SECOND)
        for keys in (FIRST, SECOND, FIRST):
            wait_until(lambda keys=keys: states(client, keys).count("pulling") == 1, f"{keys.queue} has its turn")
            os.kill(fleet.pid, signal.SIGKILL)

        wait_for_ends(client, first, keys=FIRST)
        wait_for_ends(client, second, keys=SECOND)

        for keys, job_ids in ((FIRST, first), (SECOND, second)):
            check_every_token_once(client, dict(zip(job_ids, asks, strict=True)), keys=keys)
            check_nothing_is_left(client, keys=keys)

    @pytest.mark.long
    def test_when_the_present_worker_hangs_then_it_is_killed_and_its_job_resumes_in_its_next_turn(
        self, start: StartFleet, client: Any
    ) -> None:
        fleet = start(FILE + "stop-s = 1\n")
        wait_until(lambda: states(client, FIRST) == ["pulling"], "the first has its turn")
        (long,) = submit_all(client, [LONG_ASK], keys=FIRST)
        wait_until(lambda: num_on_channel(client, long, keys=FIRST) >= 10, "it speaks")
        os.kill(fleet.pid, signal.SIGSTOP)

        (short,) = submit_all(client, [SHORT_ASK], keys=SECOND)
        wait_for_ends(client, [short], keys=SECOND)
        wait_for_ends(client, [long], keys=FIRST)

        assert "worker did not stop in time: killed" in fleet.output
        check_every_token_once(client, {long: LONG_ASK}, keys=FIRST)
        assert int(field_of(client, long, "attempt", keys=FIRST) or 0) == 2


@pytest.mark.long
class TestGivenAModelThatComputesAndOneThatDoesNot:
    FILE = FILE.replace('model = "null?step_s=0.01"', f'model = "{SMALL_MODEL}"\nmax-num-seqs = 2')

    def test_when_a_job_is_away_for_a_turn_then_its_text_is_that_of_a_calm_run(
        self, start: StartFleet, client: Any, valkey: RedisServer
    ) -> None:
        start(self.FILE)
        options: dict[str, Any] = {"max_tokens": 400, "min_tokens": 400, "temperature": 0.8}
        with Producer(valkey.url, queue="first") as first, Producer(valkey.url, queue="second") as second:

            def submit() -> list[JobId]:
                return [first.submit("Once upon a time", seed=seed, **options).id for seed in range(NUM_JOBS)]

            calm = [first.result(job_id, timeout_s=120) for job_id in submit()]

            job_ids = submit()
            wait_until(lambda: num_on_channel(client, job_ids[0], keys=FIRST) >= 5, "it speaks")
            other = second.result(second.submit("short", max_tokens=5), timeout_s=120)
            results = [first.result(job_id, timeout_s=120) for job_id in job_ids]

        assert other.model == "null"
        assert max(int(field_of(client, job_id, "attempt", keys=FIRST) or 0) for job_id in job_ids) > 1, (
            "some were away"
        )
        assert [one.choices[0].token_ids for one in results] == [one.choices[0].token_ids for one in calm]
        assert [one.text for one in results] == [one.text for one in calm]

    def test_when_a_gateway_is_asked_then_it_knows_both_and_each_answers(
        self, start: StartFleet, client: Any, valkey: RedisServer
    ) -> None:
        start(self.FILE)
        wait_until(lambda: states(client, FIRST) == ["pulling"], "the first has its turn")
        with gateway_process(valkey.url, "--queue", "first", "--queue", "second") as gateway:
            openai = gateway.client()

            names = sorted(model.id for model in openai.models.list())
            answers = [openai.completions.create(model=name, prompt="Hello", max_tokens=3) for name in names]

            assert names == sorted([SMALL_MODEL.name, "null"])
            assert [answer.model for answer in answers] == names
