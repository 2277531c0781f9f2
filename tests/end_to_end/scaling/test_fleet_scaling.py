"""`worker fleet` with real workers: out under a backlog, in to none when idle, and nothing lost on the way."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sluice.protocol.limits import CAPACITY
from sluice.protocol.redis.surveys import survey
from sluice.protocol.scaling.backlog import backlog_of
from sluice.protocol.wire import JobOptions
from tests.end_to_end.processes import FAST, ROOT, WorkerProcess
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    field_of,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.servers import RedisServer

pytestmark = pytest.mark.slow


class Fleet(WorkerProcess):
    """A fleet that wants to clear its backlog within two seconds."""

    COMMAND: ClassVar[tuple[str, ...]] = ("fleet", "--scale-to-backlog", "--within", "2", "--scale-in-after", "1")


@pytest.fixture
def fleet(valkey: RedisServer, tmp_path: Path) -> Generator[Fleet]:
    """At most two workers, each with four sequences of 100 tokens a second."""
    made = Fleet(valkey.url, tmp_path / "log", SLUICE_PROCESSES="2", SLUICE_MAX_NUM_SEQS="4")
    yield made
    made.kill()


def scaled(log: str) -> list[tuple[int, int]]:
    """The numbers of workers, before and after each change."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [(line["before"], line["workers"]) for line in lines if line["event"] == "workers scaled"]


def backlog(client: Any) -> Any:
    """The backlog of the queue now."""
    return backlog_of("default", [survey(client, KEYS)])


@pytest.mark.long
class TestGivenAFleetThatScalesToTheBacklog:
    def test_when_jobs_come_and_end_then_workers_come_and_leave_and_nothing_is_lost(
        self, fleet: Fleet, valkey: RedisServer
    ) -> None:
        asks = [Ask(prompt=f"job {i}", options=JobOptions(max_tokens=100), seed=i) for i in range(60)]
        with valkey.client() as client:
            job_ids = submit_all(client, asks[:32]) + submit_all(client, asks[32:])

            wait_for_ends(client, job_ids)
            wait_until(lambda: scaled(fleet.output)[-1][1] == 0, "no worker is wanted")
            wait_until(lambda: client.zcard(KEYS.key("alive")) == 0, "both have left")
            left = backlog(client)
            again = [Ask(prompt="again", options=JobOptions(max_tokens=5))]
            wait_for_ends(client, submit_all(client, again))

            assert [max(pair) for pair in scaled(fleet.output)][:2] == [1, 2], "one to measure, then both"
            assert (left.workers, left.backlog_jobs, left.rate_source) == (0, 0, "remembered")
            assert 200 < float(client.hget(KEYS.key("config"), CAPACITY)) < 600
            check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
            check_nothing_is_left(client)
            assert {int(field_of(client, one, "attempt") or 0) for one in job_ids} == {1}, (
                "a drained worker ends its jobs"
            )
        fleet.signal(signal.SIGTERM)
        assert fleet.wait() == 0, fleet.output


class TestGivenWrongFlags:
    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ((), "give one of --scale-to-backlog and --scale-to-jobs"),
            (("--scale-to-backlog", "--scale-to-jobs", "3"), "give one of"),
            (("--scale-to-backlog", "--min", "3", "--processes", "2"), "min 3, max 2"),
        ],
    )
    def test_when_it_is_started_then_one_sentence_says_what_is_wrong(self, flags: tuple[str, ...], words: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}

        ended = subprocess.run(
            [sys.executable, "-P", "-m", "sluice.worker", "fleet", *flags, "--redis-url", "redis://127.0.0.1:1"],
            cwd=ROOT, env={**environ, **FAST}, capture_output=True, text=True, check=False,
        )  # fmt: skip

        assert ended.returncode == 2
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr
