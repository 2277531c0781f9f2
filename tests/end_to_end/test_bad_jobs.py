"""Poison jobs, which kill their process each time they run, in a batch of 64; and a nemesis that kills workers.

Workers are real processes, restarted whenever they end. The poison-job rule must fail the one guilty job in the
first case and no job in the second.
"""

import os
import random
import signal
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from sluice.protocol import calls
from sluice.protocol.calls import JobView
from sluice.protocol.limits import SLICE_JOBS
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobOptions
from tests.chaos.soak.fleet import Fleet, fleet
from tests.end_to_end.processes import FAST
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    read_channel,
    submit_all,
    wait_for_ends,
)
from tests.servers import RedisServer

OBEDIENT = "null?step_s=0.005&obey_prompts=1"
NEMESIS_EVERY_S = 3.0


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:  # Any: redis-py's clients share no typed base
    with valkey.client() as client:
        # No worker counts as dead right after the start of a server.
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


@contextmanager
def workers(server: RedisServer, folder: Path, count: int, **settings: str) -> Generator[Fleet]:
    """So many at any time."""

    def command(_num_starts: int) -> tuple[str, ...]:
        return ("sluice.worker", "start", "--redis-url", server.url)

    known = {name.removeprefix("SLUICE_"): value for name, value in FAST.items()}
    with fleet("worker", [command] * count, folder, **{**known, **settings}) as made:
        yield made


def look(client: Any, job_ids: Sequence[JobId]) -> list[JobView]:
    """Return the views of jobs that the queue must have."""
    slices = [job_ids[at : at + SLICE_JOBS] for at in range(0, len(job_ids), SLICE_JOBS)]
    views = [view for some in slices for view in run(client, calls.status(KEYS, some))]
    assert None not in views
    return [view for view in views if view is not None]


class TestGivenOneJobAmong64ThatEndsItsProcessEachTime:
    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["kill", "hang", "abort", "lose"])
    @pytest.mark.long
    def test_when_it_has_done_so_repeatedly_then_it_is_failed_and_its_63_mates_are_right(
        self, valkey: RedisServer, client: Any, tmp_path: Path, how: str
    ) -> None:
        asks = [Ask(prompt=f"mate {i}", options=JobOptions(max_tokens=30), seed=i) for i in range(63)]
        asks.insert(17, Ask(prompt=f"[[{how}@10]]", options=JobOptions(max_tokens=30)))
        settings = {"MODEL": OBEDIENT, "STEP_DEADLINE_S": "0.6"}
        with workers(valkey, tmp_path, 2, **settings):
            job_ids = submit_all(client, asks)
            wait_for_ends(client, job_ids, patience_s=60)

        guilty = look(client, job_ids)[17]
        assert client.zrange(KEYS.key("dead"), 0, -1) == [guilty.id.encode()]
        assert (guilty.state, guilty.error_code) == (JobState.FAILED, "killed_its_worker")
        assert guilty.attempt >= 4
        # The list restarts when the job makes progress, so the deaths in company may be missing in it.
        # Between two deaths alone there may be one that was not apart, which does not count.
        alone = [death for death in guilty.deaths if death.is_apart and death.mates == 0]
        assert len(alone) >= 2
        assert alone[-1] == guilty.deaths[-1]
        assert len({death.incarnation for death in guilty.deaths}) == len(guilty.deaths)
        num_published = sum(len(entry.token_ids) for entry in read_channel(client, guilty.id))
        assert guilty.published == (num_published,)
        assert 0 < num_published <= 10
        innocent = {job_id: ask for job_id, ask in zip(job_ids, asks, strict=True) if job_id != guilty.id}
        assert len(innocent) == 63
        check_every_token_once(client, innocent)
        check_nothing_is_left(client)


def dead_jobs(client: Any) -> list[tuple[object, ...]]:
    """What there is to know of the poison jobs that have failed."""
    ids = [JobId(one.decode()) for one in client.zrange(KEYS.key("dead"), 0, -1)]
    return [(view.id, view.attempt, view.error_code, view.error, view.deaths) for view in look(client, ids)]


def run_nemesis(
    server: RedisServer, client: Any, folder: Path, *, for_s: float, every_s: float, min_kills: int = 0
) -> None:
    """Kill a worker that has jobs every `every_s`, while jobs keep coming, for that time and at least so often."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # noqa: T201  # shown where it fails
    dice = random.Random(seed)
    num_kills = num_jobs = 0
    open_jobs: dict[JobId, Ask] = {}
    with workers(server, folder, 3, MODEL="null?step_s=0.01") as members:
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s or num_kills < min_kills:
            asks = [
                Ask(prompt=f"p{num_jobs + i}", options=JobOptions(max_tokens=dice.randint(1, 120)), seed=num_jobs + i)
                for i in range(48)
            ]
            num_jobs += len(asks)
            open_jobs.update(zip(submit_all(client, asks), asks, strict=True))
            time.sleep(every_s)  # the nemesis's own pace
            with suppress(ProcessLookupError, IndexError):
                _kill_one(client, members, dice)
                num_kills += 1
            assert dead_jobs(client) == []
            _forget_the_done(client, open_jobs)
        wait_for_ends(client, list(open_jobs), patience_s=120)
        assert dead_jobs(client) == []
        check_every_token_once(client, open_jobs)
    check_nothing_is_left(client)
    print(f"{num_kills} kills, {num_jobs} jobs")  # noqa: T201  # as above


def _kill_one(client: Any, fleet: Fleet, dice: random.Random) -> None:
    """A worker that holds jobs, or any if none does."""
    by_pid = fleet.by_worker_pid()
    busy = [
        pid
        for incarnation in map(bytes.decode, client.zrange(KEYS.key("alive"), 0, -1))
        if client.hlen(KEYS.key("held", incarnation))
        and (pid := int(client.hget(KEYS.key("worker", incarnation), "pid") or 0)) in by_pid
    ]
    os.kill(dice.choice(busy or list(by_pid)), signal.SIGKILL)


def _forget_the_done(client: Any, open_jobs: dict[JobId, Ask]) -> None:
    """Check those that are done, so that an hour's jobs need not be kept."""
    ids = list(open_jobs)
    ended = [
        view.id for at in range(0, len(ids), 256) for view in look(client, ids[at : at + 256]) if view.state.is_terminal
    ]
    check_every_token_once(client, {job_id: open_jobs.pop(job_id) for job_id in ended})


class TestGivenANemesis:
    """It kills workers that did nothing wrong."""

    @pytest.mark.long
    def test_when_it_kills_for_some_seconds_then_no_innocent_job_is_given_up(
        self, valkey: RedisServer, client: Any, tmp_path: Path
    ) -> None:
        run_nemesis(valkey, client, tmp_path, for_s=3, every_s=0.5, min_kills=4)

    @pytest.mark.long
    @pytest.mark.timeout(0)
    def test_when_it_kills_every_three_seconds_for_an_hour_then_no_innocent_job_fails(
        self, valkey: RedisServer, client: Any, tmp_path: Path
    ) -> None:
        minutes = float(os.environ.get("NEMESIS_MINUTES", "60"))

        run_nemesis(valkey, client, tmp_path, for_s=60 * minutes, every_s=NEMESIS_EVERY_S)
