"""The processes of rq workers: who restarts them, and until when."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import LogCapture

from sluice.worker.callbacks import rq_workers
from sluice.worker.callbacks.command import main
from sluice.worker.callbacks.mover import Mover
from sluice.worker.callbacks.rq_workers import WorkerPool
from sluice.worker.callbacks.settings import CallbackSettings
from sluice.worker.errors import ExitCode
from tests.history import events as e
from tests.history.test_recorder import client_of, num_logged, until
from tests.servers import RedisServer
from tests.worker.callbacks.test_callbacks import settings_for


def end_at_once(queue: str, settings: CallbackSettings) -> None:
    """Stand in for an rq worker that a signal to the whole group has ended."""
    del queue, settings


class TestGivenRqWorkersThatEnd:
    def test_when_a_stop_was_asked_for_then_none_is_restarted(
        self, valkey: RedisServer, log: LogCapture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rq_workers, "RESTART_AFTER_S", 0.02)
        monkeypatch.setattr(rq_workers, "work", end_at_once)
        settings = settings_for(valkey)
        pool = WorkerPool([settings.rq_names.chores], settings)
        pool.start()
        begun = multiprocessing.active_children()

        pool.close()
        until(lambda: not any(one.is_alive() for one in begun), "it has ended")
        pool.stop()

        assert len(begun) == 1
        assert num_logged(log, "rq worker ended; restarting") == 0
        assert multiprocessing.active_children() == []


class TestGivenAMoverThatFails:
    def test_when_it_has_then_the_command_ends_with_1_and_without_children(
        self, valkey: RedisServer, sqlite_url: str, log: LogCapture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_mover: Mover) -> None:
            raise RuntimeError("injected")

        monkeypatch.setattr(Mover, "run", fail)
        monkeypatch.setattr(rq_workers, "work", end_at_once)

        code = main(settings_for(valkey, sqlite_url, secret=None))

        assert code == ExitCode.BROKEN
        assert num_logged(log, "callbacks failed") == 1
        assert multiprocessing.active_children() == []


@pytest.mark.slow
class TestGivenTheCommand:
    """`worker callbacks`, in a process group of its own, as under a supervisor or a terminal."""

    def test_when_the_whole_group_is_told_to_stop_then_no_rq_worker_is_restarted(
        self, valkey: RedisServer, durable_valkey: RedisServer, sqlite_url: str, tmp_path: Path
    ) -> None:
        rq, log = client_of(valkey), tmp_path / "log"
        environ = {
            **os.environ, "SLUICE_REDIS_URL": durable_valkey.url, "SLUICE_CALLBACKS_REDIS_URL": valkey.url,
            "SLUICE_DATABASE_URL": sqlite_url, "SLUICE_QUEUE": e.QUEUE,
        }  # fmt: skip
        command = [sys.executable, "-m", "sluice.worker", "callbacks"]
        with (
            log.open("wb") as file,
            subprocess.Popen(command, env=environ, stdout=file, stderr=file, process_group=0) as process,
        ):
            try:
                until(lambda: rq.scard("rq:workers") == 2, "chores and the gateway's tasks have an rq worker each")
                # The mover waits for its reply meanwhile, so that the command outlives its rq workers.
                send(durable_valkey, signal.SIGSTOP)
                os.killpg(process.pid, signal.SIGTERM)

                process.wait(60)
            finally:
                send(durable_valkey, signal.SIGCONT)
                process.kill()

        assert "callbacks stopped" in log.read_text()
        assert "restarting" not in log.read_text()


def send(server: RedisServer, number: signal.Signals) -> None:
    """Send a signal to the server's process."""
    assert server.process is not None
    server.process.send_signal(number)
