"""Questions to the history, on SQLite and PostgreSQL."""

import random
import re
import sqlite3
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import sqlalchemy as sa
from sqlalchemy.event import listen, remove

from sluice.history.database import open_database
from sluice.history.filters import JobFilter
from sluice.history.queries import Forgotten, History
from sluice.history.tables import attempts, jobs, results
from sluice.producer.errors import HistoryUnavailable
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from sluice.worker.recorder.migrate import migrate

NOON_MS = 1_800_000_000_000


@pytest.fixture
def queue() -> str:
    """A queue that no other test uses."""
    return uuid4().hex


@pytest.fixture
def engine(history_url: str) -> Iterator[sa.Engine]:
    """The database, to put rows in."""
    engine = open_database(history_url, is_writer=True)
    yield engine
    engine.dispose()


@pytest.fixture
def history(history_url: str) -> Iterator[History]:
    """What is tested."""
    with History(history_url, is_writer=True) as history:
        yield history


def put(engine: sa.Engine, queue: str, name: str, **columns: object) -> JobId:
    """A row for one job."""
    job_id = JobId(f"0.acme.{queue}-{name}")
    usual = {"id": job_id, "queue": queue, "partition": 0, "tenant": "acme", "version": 3, "state": "done",
             "submitted_ms": NOON_MS, "output_tokens": 11, "choices": 1}  # fmt: skip
    with engine.begin() as connection:
        connection.execute(jobs.insert().values({**usual, **columns}))
    return job_id


class TestGivenJobsInTheHistory:
    def test_when_they_are_listed_then_the_newest_come_first_and_filters_hold(
        self, engine: sa.Engine, history: History, queue: str
    ) -> None:
        for i in range(5):
            put(
                engine,
                queue,
                str(i),
                submitted_ms=NOON_MS + i,
                batch="b" if i % 2 else None,
                state="failed" if i == 4 else "done",
            )

        def names(wanted: JobFilter, limit: int = 100) -> list[str]:
            return [row.id[-1] for row in history.jobs(wanted, limit=limit)]

        assert names(JobFilter(queue=queue)) == ["4", "3", "2", "1", "0"]
        assert names(JobFilter(queue=queue), limit=2) == ["4", "3"]
        assert names(JobFilter(queue=queue, batch="b")) == ["3", "1"]
        assert names(JobFilter(queue=queue, state="failed")) == ["4"]
        assert names(JobFilter(queue=queue, since_ms=NOON_MS + 3)) == ["4", "3"]
        assert names(JobFilter(queue=queue, tenant="other")) == []
        assert history.counts(JobFilter(queue=queue)) == {"done": 4, "failed": 1}
        batch = history.batch(queue, "b")
        assert batch is not None
        assert (batch["jobs"], batch["done"]) == (2, 2)
        assert history.batch(queue, "unknown") is None

    def test_when_one_is_shown_then_durations_and_timeline_are_there(
        self, engine: sa.Engine, history: History, queue: str
    ) -> None:
        job_id = put(engine, queue, "one", scheduled_ms=NOON_MS + 100, first_token_ms=NOON_MS + 200,
                     finished_ms=NOON_MS + 1200, metadata={"user": "7"}, seed="5")  # fmt: skip
        with engine.begin() as connection:
            for epoch in (1, 2):
                row = {
                    "job_id": job_id,
                    "submitted_ms": NOON_MS,
                    "epoch": epoch,
                    "attempt": epoch,
                    "incarnation": f"i{epoch}",
                }
                connection.execute(attempts.insert().values(**row, started_ms=NOON_MS + 50 * epoch, gap_s=epoch / 2))

        row = history.job(queue, job_id)
        timeline = history.timeline(queue, job_id)

        assert row is not None
        assert (row.queue_s, row.ttft_s, row.tpot_s, row.e2e_s) == (0.1, 0.2, 0.1, 1.2)
        assert row.metadata == {"user": "7"}
        events = ["submitted", "pulled", "pulled", "scheduled", "first_token", "done"]
        assert sorted(event.event for event in timeline) == sorted(events)
        assert [event.at_ms for event in timeline] == sorted(event.at_ms for event in timeline)
        assert [(one.attempt, one.gap_s) for one in history.attempts(queue, job_id)] == [(1, 0.5), (2, 1.0)]
        assert history.job(queue, "0.acme.nobody") is None

    def test_when_percentiles_are_asked_for_then_they_are_those_of_the_samples(
        self, engine: sa.Engine, history: History, queue: str
    ) -> None:
        draw = random.Random(5)
        waits_ms = [draw.randrange(1, 10_000) for _ in range(50)]
        for i, wait_ms in enumerate(waits_ms):
            put(engine, queue, str(i), first_token_ms=NOON_MS + wait_ms, batch="b" if i < 30 else None)
        put(engine, queue, "failed", state="failed", first_token_ms=NOON_MS + 10**6)

        [row] = [row for row in history.latency(JobFilter(queue=queue, batch="b")) if row.metric == "ttft_s"]

        ordered = sorted(wait_ms / 1000 for wait_ms in waits_ms[:30])
        expected = list(np.percentile(ordered, [50, 90, 95, 99]))
        assert [row.p50_s, row.p90_s, row.p95_s, row.p99_s] == pytest.approx(expected)
        assert (row.jobs, row.max_s) == (30, ordered[-1])
        assert row.mean_s == pytest.approx(statistics.fmean(ordered))
        assert row.p50_s == pytest.approx(statistics.median(ordered))

    def test_when_jobs_are_forgotten_then_only_their_state_and_times_are_left(
        self, engine: sa.Engine, history: History, queue: str
    ) -> None:
        kept = put(engine, queue, "kept", prompt="secret", error="secret")
        gone = put(engine, queue, "gone", prompt="secret", error="secret", options={"a": 1}, metadata={"user": "7"})
        late = JobId(f"0.acme.{queue}-late")
        with engine.begin() as connection:
            for job_id in (kept, gone):
                row: dict[str, object] = {
                    "job_id": job_id,
                    "submitted_ms": NOON_MS,
                    "version": 3,
                    "finished_ms": NOON_MS,
                }
                connection.execute(results.insert().values(**row, choices=list[object](), usage=dict[str, object]()))

        forgotten = [
            Forgotten(id=gone, queue=queue, state=None),
            Forgotten(id=late, queue=queue, state=JobState.DONE, submitted_ms=NOON_MS),
        ]
        known = history.forget(forgotten)

        assert known == {gone}
        with engine.connect() as connection:
            rows = {
                row["id"]: row for row in connection.execute(sa.select(jobs).where(jobs.c.queue == queue)).mappings()
            }
        assert "secret" not in str(rows[gone])
        assert rows[gone]["metadata"] is rows[gone]["options"] is None
        assert (rows[gone]["state"], rows[gone]["submitted_ms"]) == ("done", NOON_MS)
        # What is still on its way to the history finds the job closed.
        assert rows[late]["deleted_ms"] is not None
        assert rows[kept]["prompt"] == "secret"
        assert (history.result(queue, gone), history.result(queue, kept)) == (None, {"choices": [], "usage": {}})


class TestGivenOneIdInTwoQueues:
    """A user gave the same id twice. `other` has the newer job."""

    @pytest.fixture
    def other(self, queue: str) -> str:
        return f"{queue}-other"

    @pytest.fixture(autouse=True)
    def job_id(self, engine: sa.Engine, queue: str, other: str) -> JobId:
        job_id = put(engine, queue, "one", prompt="ours")
        put(engine, other, "one", id=job_id, submitted_ms=NOON_MS + 1, state="failed", prompt="theirs")
        with engine.begin() as connection:
            for submitted_ms in (NOON_MS, NOON_MS + 1):
                own = {"job_id": job_id, "submitted_ms": submitted_ms}
                result: dict[str, object] = {
                    "version": 3,
                    "finished_ms": submitted_ms,
                    "choices": [submitted_ms],
                    "usage": {},
                }
                connection.execute(results.insert().values(**own, **result))
                connection.execute(attempts.insert().values(**own, epoch=1, attempt=1, started_ms=submitted_ms))
        return job_id

    def test_when_it_is_looked_up_then_it_is_the_one_of_the_queue(
        self, history: History, queue: str, other: str, job_id: JobId
    ) -> None:
        found = {name: history.job(name, job_id) for name in (queue, other)}

        assert {name: row and row.state for name, row in found.items()} == {queue: "done", other: "failed"}
        assert history.num_submissions(queue, job_id) == 1
        assert history.result(queue, job_id) == {"choices": [NOON_MS], "usage": {}}
        assert [one.started_ms for one in history.attempts(queue, job_id)] == [NOON_MS]
        assert {one.at_ms for one in history.timeline(queue, job_id) if one.event == "submitted"} == {NOON_MS}
        newest = history.job((queue, other), job_id)
        assert newest is not None
        assert newest.queue == other
        assert history.job("no-queue", job_id) is None

    def test_when_one_is_forgotten_then_the_other_keeps_all(
        self, engine: sa.Engine, history: History, queue: str, other: str, job_id: JobId
    ) -> None:
        known = history.forget([Forgotten(id=job_id, queue=queue, state=JobState.DONE, submitted_ms=NOON_MS)])

        assert known == {job_id}
        assert history.result(queue, job_id) is None
        assert history.result(other, job_id) == {"choices": [NOON_MS + 1], "usage": {}}
        with engine.connect() as connection:
            columns = (jobs.c.queue, jobs.c.prompt, jobs.c.deleted_ms.is_(None))
            query = sa.select(*columns).where(jobs.c.id == job_id).order_by(jobs.c.submitted_ms)
            rows = [tuple(row) for row in connection.execute(query)]
        assert [(name, prompt, bool(is_kept)) for name, prompt, is_kept in rows] == [
            (queue, None, False), (other, "theirs", True),
        ]  # fmt: skip


class TestGivenAQueueOfManyJobs:
    def test_when_one_is_looked_up_then_the_others_are_not_read(self, tmp_path: Path, steps: list[None]) -> None:
        url = f"sqlite:///{tmp_path}/many.db"
        engine = open_database(url, is_writer=True)
        migrate(engine)
        given = {"queue": "q", "partition": 0, "tenant": "a", "version": 3, "state": "done"}
        rows = [{**given, "id": f"0.a.{number}", "submitted_ms": NOON_MS + number} for number in range(3000)]
        with engine.begin() as connection:
            connection.execute(jobs.insert(), rows)

        with History(url, is_writer=True) as history:
            steps.clear()
            assert history.job("q", "0.a.7") is not None
            assert history.num_submissions("q", "0.a.7") == 1
            assert history.timeline("q", "0.a.7") != []
            assert history.forget([Forgotten(id=JobId("0.a.7"), queue="q", state=None)]) == {"0.a.7"}

        engine.dispose()
        assert len(steps) < 50, "thousands of steps; each query over all jobs takes more"

    @pytest.fixture
    def steps(self) -> Iterator[list[None]]:
        """One for each hundred steps of SQLite."""
        found: list[None] = []

        def count(connection: object, _record: object) -> None:
            if isinstance(connection, sqlite3.Connection):
                connection.set_progress_handler(lambda: found.append(None), 100)

        listen(sa.Engine, "connect", count)
        yield found
        remove(sa.Engine, "connect", count)


class TestGivenASmallQueueInAHistoryOfMany:
    """With statistics, from which a planner knows that nearly all jobs are of another queue."""

    @pytest.mark.parametrize(
        ("databases", "filters"),
        [
            ("both", {"state": "done"}),
            ("both", {"state": "done", "since_ms": 1}),
            ("postgresql", {"tenant": "a"}),
            ("postgresql", {"batch": "b", "state": "done"}),
        ],
        ids=str,
    )
    def test_when_its_jobs_are_listed_then_they_are_found_by_the_queue(
        self, engine: sa.Engine, queue: str, databases: str, filters: dict[str, Any]
    ) -> None:
        if databases not in ("both", engine.dialect.name):
            pytest.skip("SQLite has no statistics of single values")

        plan = plan_of(engine, queue, JobFilter(queue=queue, **filters))

        assert re.search("jobs_by_(queue|batch)", plan), plan
        assert "||" not in plan


class TestGivenABatchInAnyQueue:
    def test_when_its_jobs_are_listed_by_tenant_then_the_index_of_tenants_serves(
        self, engine: sa.Engine, queue: str
    ) -> None:
        plan = plan_of(engine, queue, JobFilter(batch="b", tenant=f"{queue}-rare"))

        assert "jobs_by_tenant" in plan


def plan_of(engine: sa.Engine, queue: str, wanted: JobFilter) -> str:
    """How jobs are looked for when 30 are of the queue, and 3000 of another."""
    usual = {"partition": 0, "tenant": "a", "version": 3, "state": "done", "batch": "b"}
    rows = [
        {
            **usual,
            "id": f"0.a.{number}",
            "submitted_ms": NOON_MS + number,
            "queue": queue if number < 30 else f"{queue}-2",
        }
        for number in range(3030)
    ]
    query = wanted.newest_first([jobs.c.id]).limit(51)
    is_sqlite = engine.dialect.name == "sqlite"
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(jobs.insert(), rows)
        connection.exec_driver_sql("ANALYZE jobs")
        statement = query.compile(engine, compile_kwargs={"literal_binds": True})
        plan = connection.exec_driver_sql(f"EXPLAIN {'QUERY PLAN ' if is_sqlite else ''}{statement}").all()
        transaction.rollback()
    return "\n".join(str(row[-1]) for row in plan)


class TestGivenNoHistory:
    @pytest.mark.parametrize(
        "url", ["sqlite:////nowhere/history.db", "postgresql://127.0.0.1:1/x", "mysql://x", "nonsense"]
    )
    def test_when_it_is_opened_then_the_error_says_what_to_do(self, url: str) -> None:
        with pytest.raises(HistoryUnavailable), History(url):
            pass

    def test_when_the_file_has_no_tables_then_the_error_says_so_and_nothing_is_made(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.db"
        with (
            pytest.raises(HistoryUnavailable, match=r"no job history.* yet: a worker creates it, or `worker migrate`"),
            History(f"sqlite:///{path}"),
        ):
            pass
        assert not path.exists()

        path.touch()
        with pytest.raises(HistoryUnavailable, match="worker migrate"), History(f"sqlite:///{path}"):
            pass
