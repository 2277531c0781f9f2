"""`worker start` as process 1 of a PID namespace, and in a group whose supervisor signals every process."""

import os
import shutil
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.protocol.states import JobState
from sluice.protocol.wire import JobOptions
from tests.end_to_end.processes import WorkerProcess
from tests.integration.jobs import KEYS, Ask, field_of, num_on_channel, state_of, submit_all, wait_for_ends, wait_until
from tests.servers import RedisServer

ASK = Ask(options=JobOptions(max_tokens=60))
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:  # Any: redis-py's clients share no typed base
    with valkey.client() as client:
        yield client


class Contained(WorkerProcess):
    """A worker whose parent is process 1 of its namespace."""

    PREFIX = NAMESPACE

    @property
    def parent_pid(self) -> int:
        """Process 1, by its number outside."""
        return psutil.Process(self.process.pid).children()[0].pid

    def zombies(self) -> list[psutil.Process]:
        """Processes below process 1 that have ended and were not reaped."""
        children = psutil.Process(self.parent_pid).children(recursive=True)
        return [one for one in children if one.status() == psutil.STATUS_ZOMBIE]


def can_unshare() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_unshare(), reason="needs the right to make a PID namespace (root, or CAP_SYS_ADMIN)")
class TestGivenProcess1OfAContainer:
    @pytest.fixture
    def worker(self, valkey: RedisServer, tmp_path: Path) -> Generator[Contained]:
        made = Contained(valkey.url, tmp_path / "log")
        try:
            made.wait_until_started()
            yield made
        finally:
            made.kill()

    def test_when_it_gets_sigterm_then_it_finishes_its_job_and_exits_with_0(
        self, worker: Contained, client: Any
    ) -> None:
        (job_id,) = submit_all(client, [ASK])
        wait_until(lambda: num_on_channel(client, job_id) >= 3, "it runs")

        os.kill(worker.parent_pid, signal.SIGTERM)

        assert worker.wait() == 0
        assert state_of(client, job_id) is JobState.DONE
        assert client.zcard(KEYS.key("alive")) == 0, "it deregistered"

    def test_when_its_worker_is_killed_then_it_exits_with_137(self, worker: Contained) -> None:
        os.kill(worker.pid, signal.SIGKILL)

        assert worker.wait() == 128 + signal.SIGKILL

    @pytest.mark.skipif(shutil.which("nsenter") is None, reason="needs nsenter")
    def test_when_processes_lose_their_parent_then_it_reaps_them(self, worker: Contained) -> None:
        script = "for i in 1 2 3; do (sleep 0.2 & echo $! ) ; done"
        enter = ("nsenter", "--target", str(worker.parent_pid), "--pid", "--mount", "sh", "-c", script)
        done = subprocess.run(enter, check=True, capture_output=True, text=True)
        assert len(done.stdout.split()) == 3

        def sleeps() -> list[psutil.Process]:
            return [one for one in psutil.Process(worker.parent_pid).children() if one.name() == "sleep"]

        wait_until(lambda: not sleeps(), "they have ended, and none is a zombie")
        assert worker.zombies() == []
        assert worker.process.poll() is None


class TestGivenASupervisorThatSignalsEveryProcess:
    """As systemd does with `KillMode=control-group`."""

    @pytest.fixture
    def worker(self, valkey: RedisServer, tmp_path: Path) -> Generator[WorkerProcess]:
        made = WorkerProcess(valkey.url, tmp_path / "log")
        try:
            made.wait_until_started()
            yield made
        finally:
            made.kill()

    def test_when_all_get_sigterm_then_the_worker_finishes_its_job(self, worker: WorkerProcess, client: Any) -> None:
        (job_id,) = submit_all(client, [ASK])
        wait_until(lambda: num_on_channel(client, job_id) >= 3, "it runs")
        child = worker.pid

        os.kill(child, signal.SIGTERM)
        worker.wait_for_line("draining")
        worker.signal(signal.SIGTERM)

        assert worker.wait() == 0
        assert state_of(client, job_id) is JobState.DONE

    def test_when_the_parent_is_killed_in_the_drain_then_it_goes_on(self, worker: WorkerProcess, client: Any) -> None:
        (job_id,) = submit_all(client, [ASK])
        wait_until(lambda: num_on_channel(client, job_id) >= 3, "it runs")
        worker.signal(signal.SIGTERM)
        worker.wait_for_line("draining")

        worker.signal(signal.SIGKILL)
        wait_for_ends(client, [job_id])

        assert field_of(client, job_id, "attempt") == "1"
        assert state_of(client, job_id) is JobState.DONE
