"""`worker migrate-queue` is killed after any of its calls, or before: run again, it loses and doubles nothing."""

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Generator
from functools import cache
from typing import Any

import pytest
from redis.exceptions import ResponseError

from sluice.protocol import limits, scripts
from sluice.protocol.calls import Call
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.worker import queue_migration
from sluice.worker.config import load_config
from sluice.worker.errors import ExitCode, WorkerError
from tests.grids import fast_only, grid
from tests.integration.jobs import check_every_token_once, check_nothing_is_left, state_of, wait_for_ends
from tests.integration.workers import running_worker
from tests.migration.recorded import KEYS, asked, end_workers, names_of_format_1, picture, restore
from tests.protocol.driving import Queue, check
from tests.protocol.failing.commands import run_failing
from tests.servers import RedisServer, redis_server

SLICE = 2
"""Jobs a call moves here, so that there are many calls."""

NUM_CALLS = 37
_forks = multiprocessing.get_context("fork")


def migrate(url: str, *, dies_at: int | None = None, is_late: bool = False) -> ExitCode:
    """Run the command in this process, which kills itself before or after its call of a number."""
    limits.SLICE_JOBS = SLICE
    queue_migration.SLICE_JOBS = SLICE
    scripts.load.cache_clear()
    num_calls = 0

    def counting(client: Any, call: Call[Any]) -> Any:
        nonlocal num_calls
        is_here = num_calls == dies_at
        num_calls += 1
        if is_here and not is_late:
            os.kill(os.getpid(), signal.SIGKILL)
        reply = run(client, call)
        if is_here:
            os.kill(os.getpid(), signal.SIGKILL)
        return reply

    queue_migration.run = counting
    config = load_config({}, flags={"redis.url": url})
    return queue_migration.run_migration(config, {}, ["default"], wait_s=0, say=lambda _: None)


def in_a_process(url: str, **options: Any) -> int | None:
    """Run the command in a fork; return how that ended."""
    process = _forks.Process(target=lambda: os._exit(migrate(url, **options)))
    process.start()
    process.join(60)
    return process.exitcode


@cache
def calm_picture() -> dict[str, Any]:
    """A queue that was moved without a kill."""
    with redis_server() as server, server.client() as client:
        restore(client)
        end_workers(client)
        assert in_a_process(server.url) == ExitCode.DONE
        return picture(client)


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        restore(client)
        end_workers(client)
        yield client


class TestGivenAMigrationThatIsKilled:
    # What is before a call is what was after the one before it, but for what the command itself knows.
    @pytest.mark.parametrize(
        ("call", "is_late"),
        grid(range(NUM_CALLS), [False, True], fast=[(0, False), *((call, True) for call in range(0, NUM_CALLS, 6))]),
    )
    def test_when_it_is_run_again_then_the_queue_is_as_without(
        self, valkey: RedisServer, client: Any, call: int, is_late: bool
    ) -> None:
        code = in_a_process(valkey.url, dies_at=call, is_late=is_late)
        assert code in (-signal.SIGKILL, ExitCode.DONE)

        assert in_a_process(valkey.url) == ExitCode.DONE

        assert picture(client) == calm_picture()
        assert names_of_format_1(client) == {"config", "leases"}
        check(Queue(client, KEYS))

    def test_when_the_calls_are_counted_then_each_was_a_place_to_die(self, valkey: RedisServer, client: Any) -> None:
        assert in_a_process(valkey.url, dies_at=NUM_CALLS) == ExitCode.DONE

    def test_when_it_dies_at_every_call_then_each_run_gets_further(self, valkey: RedisServer, client: Any) -> None:
        codes = list[int | None]()
        while ExitCode.DONE not in codes:
            # The first calls find nothing more to do each time, so they are as many as the runs before.
            codes.append(in_a_process(valkey.url, dies_at=2 + len(codes), is_late=True))
            assert len(codes) < NUM_CALLS

        assert picture(client) == calm_picture()

    @pytest.mark.parametrize("call", fast_only([12], [None, 3, 25]))
    def test_when_a_worker_drains_it_then_every_job_ends_once_with_its_text(
        self, valkey: RedisServer, client: Any, call: int | None
    ) -> None:
        if call is not None:
            assert in_a_process(valkey.url, dies_at=call) == -signal.SIGKILL
        assert in_a_process(valkey.url) == ExitCode.DONE
        ended = {"failed": JobState.FAILED, "cancelled": JobState.CANCELLED, "stopped": JobState.CANCELLED}
        runs = {job_id: one.ask for job_id, one in asked().items() if one.becomes not in ended}

        # A recorded job is due an hour after the recording.
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        with running_worker(valkey.url):
            wait_for_ends(client, list(runs))

        check_every_token_once(client, runs)
        check_nothing_is_left(client)
        queue = Queue(client, KEYS)
        assert {
            one.becomes: state_of(client, job_id) for job_id, one in asked().items() if one.becomes in ended
        } == ended
        ends = Counter(event.job_id for event in queue.events() if event.kind == "ended")
        assert ends == dict.fromkeys(asked(), 1)
        batch = queue.hash_of("batch", "closed")
        assert (batch["total"], batch["done"], "completed" in batch) == ("2", "2", True)
        assert [f[b"id"] for _, f in queue.entries(KEYS.callbacks)] == [b"0.t.two", b"closed"]


class TestGivenACommandThatFails:
    """A script has no rollback. What it has moved is written before what it deletes."""

    @pytest.mark.parametrize("number", fast_only(range(10, 420, 31), [n for n in range(1, 420) if n % 31 != 10]))
    @pytest.mark.parametrize("script", ["migrate_lanes", "migrate_jobs"])
    def test_when_it_is_run_again_then_no_job_is_lost(
        self, valkey: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch, script: str, number: int
    ) -> None:
        calm = calm_picture()

        def run_or_fail(client: Any, call: Call[Any]) -> Any:
            if call.script != script:
                return run(client, call)
            run_failing(Queue(client, KEYS), call, number)
            raise ResponseError("this command fails")

        with monkeypatch.context() as changed:
            changed.setattr(queue_migration, "run", run_or_fail)
            config = load_config({}, flags={"redis.url": valkey.url})
            with pytest.raises(WorkerError):
                queue_migration.run_migration(config, {}, ["default"], wait_s=0, say=lambda _: None)
        assert in_a_process(valkey.url) == ExitCode.DONE

        found = picture(client)
        assert states_of(found) == states_of(calm)
        # A channel whose end could not be written is noted.
        noted = {fields[b"where"].decode().partition(":2:")[2] for _, fields in client.xrange(KEYS.key("garbage"))}
        assert found["kept"] | noted == calm["kept"] | noted


def states_of(found: dict[str, Any]) -> dict[str, str]:
    """The state of each job of a picture."""
    return {name: row["state"] for name, row in found["rows"].items()}
