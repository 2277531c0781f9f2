"""The whole line with its history: one row per job, whatever dies in between; and SQL away stops nothing."""

import signal
import sqlite3
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.protocol.wire import JobId, JobOptions
from tests.end_to_end.processes import WorkerPool, WorkerProcess, worker_pool
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    num_on_channel,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.servers import RedisServer
from tests.worker.callbacks.receiver import Receiver, receiver
from tests.worker.traces.collector import ReceivedSpan, spans_at


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


@pytest.fixture
def collector() -> Generator[Receiver]:
    with receiver() as state:
        yield state


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path, client: Any) -> Generator[WorkerPool]:
    del client
    with worker_pool(valkey.url, tmp_path) as made:
        yield made


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """The `jobs` table by id."""
    if not path.exists():
        return {}
    with sqlite3.connect(path, timeout=10) as database:
        database.row_factory = sqlite3.Row
        try:
            return {row["id"]: dict(row) for row in database.execute("SELECT * FROM jobs")}
        except sqlite3.OperationalError:
            return {}
        finally:
            database.row_factory = None


def trace_of(spans: list[ReceivedSpan], job_id: str) -> str:
    """The id of a job's only trace."""
    [trace_id] = {span.trace_id for span in spans if span.attributes.get("gen_ai.request.id") == job_id}
    return trace_id


def check_trace(row: dict[str, Any], spans: list[ReceivedSpan]) -> None:
    """Both workers had the job, one after the other, and the second one ended it."""
    killed, resumed = sorted((span for span in spans if span.name == "sluice_attempt"), key=lambda span: span.start_ns)
    assert (killed.is_error, resumed.is_error) == (True, False)
    assert killed.attributes["sluice.worker"] != resumed.attributes["sluice.worker"]
    assert killed.end_ns <= resumed.start_ns
    # A phase of less than a millisecond has no span: publishing may be one, and decode, if no heartbeat came after the
    # first token of the worker that was killed.
    phases = {(span.name, span.parent_id) for span in spans if span.parent_id in (killed.span_id, resumed.span_id)}
    assert {("sluice_lost", killed.span_id), ("sluice_decode", resumed.span_id)} <= phases
    assert ("sluice_publish", killed.span_id) not in phases
    [root] = [span for span in spans if not span.parent_id]
    assert (root.start_ns, root.end_ns) == (row["submitted_ms"] * 1_000_000, row["finished_ms"] * 1_000_000)
    assert root.attributes["gen_ai.usage.output_tokens"] == row["output_tokens"]


def recorder_of(worker: WorkerProcess) -> psutil.Process:
    """The child that records."""
    wait_until(lambda: worker.pids_of("recorder"), "the recorder is started")
    return psutil.Process(worker.pids_of("recorder")[-1])


class TestGivenAWorkerWithItsRecorder:
    def test_when_the_recorder_dies_then_another_is_started(
        self, workers: WorkerPool, client: Any, tmp_path: Path
    ) -> None:
        path = tmp_path / "history.db"
        worker = workers.start_all(1, RECORDER="true", DATABASE_URL=f"sqlite:///{path}")[0]

        recorder_of(worker).kill()
        worker.wait_for_line("recorder process died; restarting")

        job_ids = submit_all(client, [Ask(options=JobOptions(max_tokens=5))])
        wait_until(lambda: ended(rows_of(path), job_ids), "the row is there")

    def test_when_their_parent_is_killed_then_worker_and_recorder_go_too(
        self, workers: WorkerPool, client: Any, tmp_path: Path
    ) -> None:
        del client
        worker = workers.start_all(1, RECORDER="true", DATABASE_URL=f"sqlite:///{tmp_path}/history.db")[0]
        worker.wait_for_line("recorder started")
        recorder = recorder_of(worker)

        processes = [recorder, psutil.Process(worker.pid)]

        worker.signal(signal.SIGKILL)

        wait_until(lambda: not any(map(is_running, processes)), "they are gone")

    def test_when_it_is_killed_and_another_goes_on_then_each_job_has_one_row_and_trace(
        self, workers: WorkerPool, client: Any, tmp_path: Path, collector: Receiver
    ) -> None:
        path = tmp_path / "history.db"
        settings = {
            "RECORDER": "true",
            "DATABASE_URL": f"sqlite:///{path}",
            "OTLP_TRACES_ENDPOINT": collector.url,
        }
        asks = [Ask(options=JobOptions(max_tokens=60), seed=i) for i in range(5)]
        first = workers.start_all(1, **settings)[0]
        job_ids = submit_all(client, asks)
        wait_until(lambda: all(num_on_channel(client, one) >= 10 for one in job_ids), "all jobs speak")
        first.signal_worker(signal.SIGKILL)
        second = workers.start_all(1, **settings)[0]
        wait_for_ends(client, job_ids)

        second.signal(signal.SIGTERM)
        assert second.wait() == 0

        check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
        rows = rows_of(path)
        assert set(rows) == set(job_ids)
        spans = spans_at(collector)
        for row in rows.values():
            check_row(row)
            check_trace(row, [span for span in spans if span.trace_id == trace_of(spans, row["id"])])

    def test_when_the_database_is_away_then_jobs_run_and_the_outbox_keeps_their_rows(
        self, workers: WorkerPool, client: Any, tmp_path: Path
    ) -> None:
        path = tmp_path / "history.db"
        asks = [Ask(options=JobOptions(max_tokens=5), seed=i) for i in range(3)]
        workers.start_all(1, RECORDER="true", DATABASE_URL=f"postgresql://db/history?host={tmp_path}")
        job_ids = submit_all(client, asks)
        wait_for_ends(client, job_ids)
        check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))

        workers.start_all(1, RECORDER="true", DATABASE_URL=f"sqlite:///{path}")

        wait_until(lambda: ended(rows_of(path), job_ids), "the rows are there")


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def ended(rows: dict[str, dict[str, Any]], job_ids: list[JobId]) -> bool:
    return all(rows.get(one, {}).get("state") == "done" for one in job_ids)


def check_row(row: dict[str, Any]) -> None:
    """What a person would read in it."""
    assert (row["state"], row["output_tokens"], row["attempts"]) == ("done", 60, 2)
    assert 10 <= row["resumed_tokens"] < 60
    assert row["exactness"] == "same_fingerprint"
    assert 0 <= row["queue_s"] <= row["ttft_s"] <= row["e2e_s"]
    # A token takes 10 ms; the gap over the death counts as one between tokens.
    assert 0.009 <= row["itl_p50_s"] <= row["itl_max_s"]
