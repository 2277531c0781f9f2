"""A batch whose name was used before, of which the queue has forgotten all and the history nothing."""

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.engine import Engine
from sqlalchemy.event import listen

from sluice.history.export import BatchJobs, export_batch
from sluice.history.rows import changes_of
from sluice.history.writer import HistoryWriter
from sluice.protocol import calls
from sluice.protocol.wire import JobId
from sluice.worker.callbacks.mover import Mover
from tests.history import events as e
from tests.history.test_recorder import client_of, recorder
from tests.protocol.driving import Queue, ending
from tests.servers import RedisServer
from tests.worker.callbacks.test_callbacks import chores_of, settings_for, try_now, work

MONTH_MS = 31 * 86_400_000
BATCH = "monthly"


def run_batch(queue: Queue, *names: str) -> None:
    """Submit jobs to the batch, end them, and close it."""
    for name in names:
        queue.add(name, batch=BATCH)
    worker = queue.worker(names[0])
    for job in worker.pull().jobs:
        worker.advance(ending(job, 0, 1, result=e.result(job.id)))
    queue.run(calls.close_batch(queue.keys, BATCH))


def lines_in(folder: Path) -> Sequence[JobId]:
    """The jobs whose output is there."""
    lines = (folder / f"{BATCH}.output.jsonl").read_text().splitlines()
    return [JobId(json.loads(line)["custom_id"]) for line in lines]


class TestGivenABatchOfLastMonth:
    def test_when_its_name_is_used_again_then_the_export_is_of_the_new_jobs(
        self, valkey: RedisServer, sqlite_url: str, sqlite_history: Engine, tmp_path: Path
    ) -> None:
        client, folder = client_of(valkey), tmp_path / "exports"
        settings = settings_for(valkey, sqlite_url, export_folder=str(folder), export_after_s=(3600,))
        queue, chores = Queue(client, e.KEYS), chores_of(settings, client)
        queue.configure(export_batches=True)
        moving = Mover(client, client, settings)
        run_batch(queue, "october-1", "october-2")
        recorder(valkey, sqlite_history).drain()
        moving.drain()
        work(client, settings, chores)
        assert len(lines_in(folder)) == 2
        client.delete(e.KEYS.key("batch", BATCH))
        queue.pass_time(MONTH_MS)

        run_batch(queue, "november-1", "november-2")
        moving.drain()
        work(client, settings, chores)
        assert chores.scheduled_job_registry.count == 1, "the recorder is behind"
        recorder(valkey, sqlite_history).drain()
        try_now(chores)
        work(client, settings, chores)

        assert lines_in(folder) == ["0.t.november-1", "0.t.november-2"]

    def test_when_a_release_before_began_it_then_all_its_jobs_are_exported(
        self, valkey: RedisServer, sqlite_url: str, sqlite_history: Engine, tmp_path: Path
    ) -> None:
        """Its hash does not say when it began."""
        client, folder = client_of(valkey), tmp_path / "exports"
        settings = settings_for(valkey, sqlite_url, export_folder=str(folder))
        queue = Queue(client, e.KEYS)
        queue.configure(export_batches=True)
        old = [e.submitted("0.t.old", batch=BATCH.encode()), e.ended("0.t.old", result=e.result("x"))]
        HistoryWriter(sqlite_history).write(changes_of(e.QUEUE, e.unpacked(old)).values())
        client.hset(e.KEYS.key("batch", BATCH), mapping={"total": 1, "done": 1})

        run_batch(queue, "new")
        recorder(valkey, sqlite_history).drain()
        Mover(client, client, settings).drain()
        work(client, settings, chores_of(settings, client))

        assert sorted(lines_in(folder)) == ["0.t.new", "line-old"]


class TestGivenALargeBatch:
    def test_when_it_is_exported_then_the_work_grows_with_its_jobs(
        self, sqlite_history: Engine, tmp_path: Path
    ) -> None:
        names = [f"0.t.{number}" for number in range(1000)]
        events = [e.submitted(name, e.NOON_MS + at, batch=BATCH.encode()) for at, name in enumerate(names)]
        HistoryWriter(sqlite_history).write(changes_of(e.QUEUE, e.unpacked(events)).values())
        steps: list[None] = []

        def count(connection: sqlite3.Connection, _record: object) -> None:
            connection.set_progress_handler(lambda: steps.append(None), 1000)

        sqlite_history.dispose()
        listen(sqlite_history, "connect", count)

        written = export_batch(sqlite_history, BatchJobs(e.QUEUE, BATCH), tmp_path)

        assert written.num_open == 1000
        assert len(steps) < 1000, "a thousand steps for each job: not one look at each other job"
