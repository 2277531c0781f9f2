"""Each fault at each crash point, with fifty jobs of all kinds: every job ends once, with every token once.

make crash-points            the whole matrix
CRASH_SEED=7 pytest … the sample of seed 7, as CI printed it
"""

import os
import random
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from sluice.history.database import open_database
from sluice.history.tables import attempts, jobs, results
from sluice.history.writer import HistoryWriter
from sluice.protocol.rows import read_row
from sluice.worker.callbacks.chore_jobs import rq_queue
from sluice.worker.callbacks.events import job_event
from sluice.worker.callbacks.mover import Mover
from sluice.worker.callbacks.settings import CallbackSettings
from sluice.worker.connection.clients import connect
from sluice.worker.recorder.migrate import migrate
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from tests.chaos.checker.rows import fields_of
from tests.chaos.crash_points import NUM_JOBS, Case, Scene, all_cases
from tests.chaos.faults.fault_proxy import Fault
from tests.chaos.scenarios import CALLBACK_URL, SCENES, Stand, stand
from tests.chaos.victim import SECRET
from tests.integration.jobs import KEYS, check_every_token_once, check_nothing_is_left, result_of
from tests.protocol.driving import Queue, check
from tests.servers import RedisServer

SEED = int(os.environ.get("CRASH_SEED") or secrets.randbelow(10**6))
CASES = tuple(all_cases())
NUM_SAMPLED = 3
CLAIM_AFTER_S = 0.01
REPORTED = {
    "version": "version",
    "attempts": "attempt",
    "submitted_ms": "submitted",
    "finished_ms": "ended",
    "seed": "seed",
    "priority": "class",
    "choices": "choices",
    "prompt_tokens": "prompt",
}
"""Column of a row -> field of the job's row with the same value."""


@pytest.fixture
def folder() -> Generator[Path]:
    """A short path: unix sockets allow about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="sluice-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An empty history."""
    path = tmp_path_factory.mktemp("history") / "empty.db"
    engine = open_database(f"sqlite:///{path}", is_writer=True)
    migrate(engine)
    engine.dispose()
    return path.read_bytes()


def try_case(server: RedisServer, case: Case, folder: Path, migrated: bytes, seed: int) -> None:
    """Inject the fault, and check consistency."""
    (folder / "history.db").write_bytes(migrated)
    url = f"sqlite:///{folder / 'history.db'}"
    with stand(server, case, seed=seed, folder=folder, socket=folder / "p.sock", database_url=url) as it:
        try:
            SCENES[case.point.scene](it)
            check_books(it)
        except BaseException:
            sys.stdout.write(f"{case}, seed {seed}, nth {it.nth}\n{it.log.read_text()[-1500:]}\n")
            raise
        assert it.has_sprung
        assert it.victim is not None
        assert (it.victim.returncode == -9) == (case.fault is Fault.KILL)


# ---------------------------------------------------------------- the books


def check_books(it: Stand) -> None:
    """Channels, results, counters, events, rows and callbacks, each against what was asked."""
    assert len(it.submitted) == NUM_JOBS
    reported = {job_id: fields_of(job_id.split(".")[1], it.client.get(KEYS.job(job_id))) for job_id in it.submitted}
    assert {job_id: job for job_id, job in reported.items() if job["state"] != "done"} == {}
    check_every_token_once(it.client, it.submitted)
    check_nothing_is_left(it.client)
    if it.case.point.scene is not Scene.RECORDING:
        check(Queue(it.client, KEYS))
        check_one_end_each(it)
    check_rows(it)
    check_callbacks(it)
    check_no_residue(it.client)


def check_one_end_each(it: Stand) -> None:
    """Among all events."""
    ends = Counter(event.job_id for event in Queue(it.client, KEYS).events() if event.kind == "ended")
    assert ends == dict.fromkeys(it.submitted, 1)


def check_rows(it: Stand) -> None:
    """After another recorder has finished: a row for each job and attempt, equal to the queue's."""
    engine = open_database(it.database_url, is_writer=True)
    settings = RecorderSettings(name="other", claim_after_s=CLAIM_AFTER_S)
    Recorder(connect(it.server.url, timeout_s=5), HistoryWriter(engine), settings).drain()
    with engine.connect() as connection:
        rows = {row.id: row for row in connection.execute(sa.select(jobs))}
        started = sa.select(attempts.c.job_id).where(attempts.c.started_ms.is_not(None))
        begun = Counter(row.job_id for row in connection.execute(started))
        texts = {row.job_id: row.choices for row in connection.execute(sa.select(results))}
    engine.dispose()
    assert set(rows) == set(it.submitted)
    for job_id in it.submitted:
        job = fields_of(job_id.split(".")[1], it.client.get(KEYS.job(job_id)))
        reported = {name: job[field] for name, field in REPORTED.items()}
        row, result = rows[job_id], result_of(it.client, job_id)
        assert (row.state, row.record_error) == ("done", None)
        assert {name: str(getattr(row, name)) for name in REPORTED} == reported, job_id
        assert row.output_tokens == sum(len(choice.token_ids) for choice in result.choices)
        assert [choice["text"] for choice in texts[job_id]] == [choice.text for choice in result.choices]
        assert begun[job_id] == row.attempts


def check_callbacks(it: Stand) -> None:
    """After another mover has finished: each end is with rq, once."""
    settings = CallbackSettings(
        redis_url=it.server.url,
        rq_url=it.server.url,
        database_url="",
        name="other",
        claim_after_s=CLAIM_AFTER_S,
        secret=SECRET,
    )
    Mover(connect(it.server.url, timeout_s=5), connect(it.server.url, timeout_s=5), settings).drain()
    queue: Any = rq_queue(settings.rq_names.webhooks, connect(it.server.url, timeout_s=5))  # Any: rq's types have holes
    enqueued = sorted(event_id for _, event_id, _ in (job.args for job in queue.get_jobs()))
    assert enqueued == sorted(_event_ids(it))


def _event_ids(it: Stand) -> Generator[str]:
    for job_id in it.submitted:
        row = it.client.get(KEYS.job(job_id))
        job = fields_of(job_id.split(".")[1], row)
        kept = {"version": "version", "at": "ended", "submitted": "submitted"}
        fields = {"id": job_id, "state": "done", **{name: job[field] for name, field in kept.items()}}
        event = job_event(KEYS, fields, read_row(row).spec)
        assert event is not None
        assert event.url == CALLBACK_URL
        yield event.id


KEPT_FOR_EVER = {
    *("clock", "config", "counters", "served", "tenants", "models", "offers", "parents", "bell", "outbox", "callbacks"),
}


def check_no_residue(client: Any) -> None:  # Any: a redis-py client
    """Remaining keys belong to the queue or expire; no entry is pending in a stream."""
    queue = Queue(client, KEYS)
    for_ever = {name for name in queue.names() if client.pttl(f"{KEYS.prefix}:{name}") < 0}
    assert for_ever <= KEPT_FOR_EVER
    assert client.xlen(KEYS.outbox) == client.xlen(KEYS.callbacks) == 0


# ---------------------------------------------------------------- the tests


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_when_a_fault_occurs_then_every_job_ends_once_with_every_token_once(
    valkey: RedisServer, migrated: bytes
) -> None:
    """A sample of the matrix, another one each time."""
    sample = random.Random(SEED).sample(CASES, NUM_SAMPLED)
    sys.stdout.write(f"CRASH_SEED={SEED}: {', '.join(map(str, sample))}\n")
    for case in sample:
        with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
            empty(valkey)
            try_case(valkey, case, Path(folder), migrated, SEED)


def empty(server: RedisServer) -> None:
    """Forget all."""
    with server.client() as client:
        client.execute_command("FLUSHALL")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_when_it_goes_wrong_then_every_job_ends_once_with_every_token_once(
    valkey: RedisServer, folder: Path, migrated: bytes, case: Case
) -> None:
    try_case(valkey, case, folder, migrated, SEED)
