"""Sweeps of the HTTP gateway: enqueued once by several movers, and run by an rq worker of their own."""

from pathlib import Path

from sluice.producer.contract.wire import JobId
from sluice.producer.gateway import tasks
from sluice.producer.gateway.responses.store import LOST, ResponseStore, StoredResponse
from sluice.producer.gateway.tables.database import Database
from sluice.producer.openai.responses import ResponseInfo
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
from sluice.worker.clock import wall_ms
from tests.servers import RedisServer
from tests.worker.callbacks.test_callbacks import settings_for, work
from tests.worker.history import events as e
from tests.worker.history.test_recorder import client_of


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
