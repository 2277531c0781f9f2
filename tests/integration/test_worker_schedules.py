"""Real worker processes fire schedules: once, while any is alive."""

from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sluice.producer import Producer
from sluice.protocol.keys import QueueKeys
from sluice.protocol.schedules.schedule import ScheduleKeys
from tests.end_to_end.processes import WorkerPool, WorkerProcess, worker_pool
from tests.integration.jobs import wait_until
from tests.producer.test_schedules import last_fired, minutes_ago
from tests.servers import RedisServer

KEYS = ScheduleKeys(QueueKeys("default"))


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path) -> Generator[WorkerPool]:
    with worker_pool(valkey.url, tmp_path) as made:
        yield made


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        yield client


def submitted(client: Any) -> int:
    """The number of jobs that the queue has accepted."""
    return int(client.hget(QueueKeys("default").key("counters"), "submitted") or 0)


def noted_s(client: Any) -> int:
    """The last time that was fired."""
    return int(client.zscore(KEYS.times, "default.report") or 0)


class TestGivenTwoWorkersAndASchedule:
    """Its daily time passed two minutes ago."""

    @pytest.fixture
    def first(self, workers: WorkerPool) -> WorkerProcess:
        return workers.start_all(2)[0]

    @pytest.fixture
    def run_s(self, first: WorkerProcess, client: Any, valkey: RedisServer) -> int:
        del first  # it runs
        run_s = minutes_ago(client, 2)
        due = datetime.fromtimestamp(run_s, UTC)
        with Producer(valkey.url) as producer:
            producer.add_schedule("report", ["one", "two"], cron=f"{due.minute} {due.hour} * * *", max_tokens=5)
        last_fired(client, 10)
        wait_until(lambda: noted_s(client) == run_s, "the run is noted")
        return run_s

    def test_when_it_is_due_then_one_run_is_submitted_and_done(
        self, valkey: RedisServer, client: Any, run_s: int
    ) -> None:
        jobs = [f"0.default.report-{run_s}", f"0.default.report-{run_s}-1"]

        with Producer(valkey.url) as producer:
            lengths = [producer.result(job, timeout_s=30).usage.output_tokens for job in jobs]

        assert lengths == [5, 5]
        assert submitted(client) == 2

    def test_when_the_note_is_lost_with_a_worker_then_the_other_notes_it_again(
        self, first: WorkerProcess, client: Any, run_s: int
    ) -> None:
        first.kill()
        client.zadd(KEYS.times, {"default.report": run_s - 60})

        wait_until(lambda: noted_s(client) == run_s, "the other worker notes it")

        assert submitted(client) == 2
