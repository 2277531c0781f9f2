"""The recorder as a process: killed in the middle, and gone with its parent."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.history.tables import jobs
from sluice.worker.connection.clients import Client
from tests.history import events as e
from tests.history.test_recorder import OUTBOX, add, client_of, pending, states, until
from tests.servers import RedisServer

PROGRAM = """
import json, sys
from sluice.worker.recorder.recorder import RecorderSettings, main
given = json.loads(sys.argv[1])
code = main(redis_url=given["redis"], database_url=given["database"], until_eof=given["until_eof"],
            settings=RecorderSettings(queues=(given["queue"],), name="r1", block_s=0.1))
print(json.dumps([name for name in ("torch", "transformers", "rq", "numpy") if name in sys.modules]))
sys.exit(code)
"""
"""What `worker record` does, with the settings that a test has."""


@contextmanager
def recorder_process(
    valkey: RedisServer, database_url: str, *, until_eof: bool = False
) -> Generator["subprocess.Popen[str]"]:
    """A recorder in a separate process; its standard input is a pipe to this one."""
    given = {"redis": valkey.url, "database": database_url, "queue": e.QUEUE, "until_eof": until_eof}
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def is_read(client: Client) -> bool:
    """Whether a recorder holds entries that it has not acknowledged."""
    return client.exists(OUTBOX) and bool(client.xinfo_groups(OUTBOX)) and pending(client) > 0


def add_events(client: Client, job_ids: list[str]) -> None:
    """Add the events of whole jobs, in entries of different sizes."""
    for begin in range(0, len(job_ids), 100):
        some = job_ids[begin : begin + 100]
        add(client, [e.submitted(job_id) for job_id in some], [e.started(job_id) for job_id in some])
        add(client, *[[e.ended(job_id) for job_id in some[start : start + 10]] for start in range(0, 100, 10)])


@contextmanager
def held_up(history: Engine) -> Generator[None]:
    """Hold the lock that a writer of the database needs."""
    is_sqlite = history.dialect.name == "sqlite"
    with history.connect() as connection:
        connection.exec_driver_sql("DELETE FROM jobs WHERE 1 = 0" if is_sqlite else "LOCK TABLE jobs IN EXCLUSIVE MODE")
        yield
        connection.rollback()


class TestGivenARecorderProcess:
    """Alongside a real Valkey and a real database."""

    def test_when_killed_again_and_again_then_every_job_has_its_row(
        self, valkey: RedisServer, history_url: str, history: Engine
    ) -> None:
        client = client_of(valkey)
        job_ids = [f"0.a.{number:05d}" for number in range(2000)]
        for some in (job_ids[:1000], job_ids[1000:]):
            with recorder_process(valkey, history_url) as process:
                until(lambda: client.exists(OUTBOX) and client.xlen(OUTBOX) == 0, "it is up")
                with held_up(history):
                    add_events(client, some)
                    until(lambda: is_read(client), "it has read and cannot write")
                    process.kill()
                    process.wait()
            assert pending(client) > 0
        with recorder_process(valkey, history_url):
            until(lambda: client.xlen(OUTBOX) == 0, "the outbox is empty")

        assert states(history) == dict.fromkeys(job_ids, "done")
        with history.connect() as connection:
            whole = sa.select(sa.func.count()).where(jobs.c.e2e_s.is_not(None), jobs.c.attempts == 1)
            assert connection.execute(whole).scalar_one() == len(job_ids)

    def test_when_its_standard_input_ends_then_it_records_what_is_there_and_ends(
        self, valkey: RedisServer, sqlite_url: str, sqlite_history: Engine
    ) -> None:
        client = client_of(valkey)
        add(client, [e.submitted("0.a.1")])
        with recorder_process(valkey, sqlite_url, until_eof=True) as process:
            until(lambda: client.xlen(OUTBOX) == 0, "it records")
            add(client, [e.ended("0.a.1")])

            output, _ = process.communicate(timeout=20)

            assert process.returncode == 0
            assert output.splitlines()[-1] == "[]"
        assert states(sqlite_history) == {"0.a.1": "done"}

    def test_when_asked_to_end_then_it_ends_well(self, valkey: RedisServer, sqlite_url: str) -> None:
        client = client_of(valkey)
        with recorder_process(valkey, sqlite_url) as process:
            until(lambda: client.exists(OUTBOX) == 1, "it is up")

            process.terminate()

            assert process.wait(20) == 0
