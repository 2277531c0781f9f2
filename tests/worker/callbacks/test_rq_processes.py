"""The processes of rq workers: who restarts them, and until when."""

import multiprocessing

import pytest
from structlog.testing import LogCapture

from sluice.worker.callbacks import rq_workers
from sluice.worker.callbacks.rq_workers import WorkerPool
from sluice.worker.callbacks.settings import CallbackSettings
from tests.servers import RedisServer
from tests.worker.callbacks.test_callbacks import settings_for
from tests.worker.history.test_recorder import num_logged, until


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
