"""Sweeps of the HTTP gateway: enqueued once by several movers, and run by an rq worker of their own."""

import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.gateway import tasks
from sluice.gateway.files import leftovers
from sluice.gateway.files.leftovers import AT_ONCE
from sluice.gateway.openai.responses import ResponseInfo
from sluice.gateway.responses.store import LOST, ResponseStore, StoredResponse
from sluice.gateway.tables.database import Database
from sluice.protocol.clock import wall_ms
from sluice.protocol.wire import JobId
from sluice.worker.callbacks.chore_jobs import rq_queue
from sluice.worker.callbacks.gateway_tasks import (
    MAX_WAITING,
    SWEEP,
    SWEEP_EVERY_MS,
    Sweeps,
    bind,
    task_named,
)
from sluice.worker.callbacks.mover import Mover
from tests.history import events as e
from tests.history.test_recorder import client_of
from tests.servers import RedisServer
from tests.worker.callbacks.test_callbacks import settings_for, work


class TestGivenSeveralMovers:
    def test_when_each_turns_then_one_sweep_is_enqueued_and_runs(
        self, valkey: RedisServer, sqlite_url: str, tmp_path: Path
    ) -> None:
        client, settings = client_of(valkey), settings_for(valkey, sqlite_url, files_url=tmp_path.as_uri())
        began_ms = wall_ms()
        for _ in range(3):
            Mover(client, client, settings).drain()
        queue = rq_queue(settings.rq_names.gateway, client)
        [*ids] = queue.get_job_ids()
        bind(settings)
        work(client, settings, queue)

        windows = wall_ms() // SWEEP_EVERY_MS - began_ms // SWEEP_EVERY_MS + 1
        assert 1 <= len(ids) <= windows
        jobs = [queue.fetch_job(job_id) for job_id in ids]
        assert all(job is not None and job.get_status() == "finished" for job in jobs)


class TestGivenAResponseWhoseJobIsLost:
    def test_when_a_sweep_runs_then_it_has_ended(self, valkey: RedisServer, sqlite_url: str, tmp_path: Path) -> None:
        client, settings = client_of(valkey), settings_for(valkey, sqlite_url, files_url=tmp_path.as_uri())
        info = ResponseInfo(job_id=JobId("0.acme.lost"), created_ms=1, model="null", options={})
        with Database(sqlite_url) as database:
            store = ResponseStore(database)
            store.add(StoredResponse(info=info, tenant="acme", queue=e.QUEUE, expires_ms=wall_ms() + 60_000))

            Mover(client, client, settings).drain()
            bind(settings)
            work(client, settings, rq_queue(settings.rq_names.gateway, client))

            found = store.get(info.id, "acme")
        assert found is not None
        assert found.end == LOST


class TestGivenManyObjectsWithoutARow:
    """They are two days old."""

    @pytest.fixture(autouse=True)
    def slow_deletes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A task works at least as long as it listed. By this clock, each reading of which takes longer, one page."""
        ticks = (float(number**2) for number in itertools.count(1))
        monkeypatch.setattr(leftovers, "time", SimpleNamespace(time=time.time, monotonic=ticks.__next__))

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Where they are."""
        at_s = time.time() - 2 * 86_400
        for place in ("files", "batches/b"):
            (tmp_path / place).mkdir(parents=True)
            for number in range(AT_ONCE + 1):
                path = tmp_path / place / f"{number:05d}"
                path.touch()
                os.utime(path, (at_s, at_s))
        return tmp_path

    def test_when_time_is_up_then_a_task_behind_those_that_wait_goes_on(
        self, valkey: RedisServer, sqlite_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client, settings = client_of(valkey), settings_for(valkey, sqlite_url, files_url=folder.as_uri())
        queue: Any = rq_queue(settings.rq_names.gateway, client)  # Any: partly untyped
        monkeypatch.setattr(tasks, "CLEAN_S", 0.0)
        bind(settings)
        until_s = time.time() + 600
        for number, task in enumerate((tasks.clean_files, tasks.sweep)):
            queue.enqueue(task, *(("", until_s) if number == 0 else ()), job_id=f"first-{number}")

        work(client, settings, queue)

        done = [job for job in map(queue.fetch_job, queue.finished_job_registry.get_job_ids()) if job is not None]
        began = {job.id: job.started_at for job in done if job.started_at is not None}
        others = [at for name, at in began.items() if name.startswith("clean-on")]
        assert others
        assert min(others) > began["first-1"]
        assert not [path for path in folder.rglob("*") if path.is_file() and path.name.isdecimal()]

    def test_when_the_hour_is_over_then_the_next_ones_task_goes_on(
        self, valkey: RedisServer, sqlite_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client, settings = client_of(valkey), settings_for(valkey, sqlite_url, files_url=folder.as_uri())
        queue: Any = rq_queue(settings.rq_names.gateway, client)  # Any: partly untyped
        monkeypatch.setattr(tasks, "CLEAN_S", 0.0)
        bind(settings)
        queue.enqueue(tasks.clean_files, "", time.time() - 1, job_id="first")

        work(client, settings, queue)

        assert queue.finished_job_registry.get_job_ids() == ["first"]
        assert sum(path.is_file() and path.name.isdecimal() for path in folder.rglob("*")) == AT_ONCE + 2


class TestGivenTasksThatNobodyRuns:
    def test_when_sweeps_are_due_then_only_some_are_kept(self, valkey: RedisServer) -> None:
        client = client_of(valkey)
        queue = rq_queue("sluice-gateway-1", client)
        client.rpush(queue.key, *(f"old-{number}" for number in range(MAX_WAITING + 1)))

        Sweeps(queue).enqueue_due()

        assert queue.count == MAX_WAITING + 1


class TestGivenTheNameOfATask:
    def test_when_it_is_the_sweep_then_it_is_found(self) -> None:
        assert task_named(SWEEP) is tasks.sweep
