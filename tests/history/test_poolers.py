"""PgBouncer in transaction mode: each transaction may run in another session, and a session has several clients."""

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from sluice.history.database import HistoryRefused, check_writable, open_database
from sluice.history.export import BatchJobs, export_batch
from sluice.history.retention import forget_before
from sluice.history.tables import SCHEMA_REVISION, jobs
from sluice.history.writer import HistoryWriter
from sluice.worker.checks.site import Site
from sluice.worker.checks.startup import check_history
from sluice.worker.config import load_config
from sluice.worker.errors import ExitCode
from sluice.worker.log import get_log
from sluice.worker.recorder.migrate import main, migrate
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from tests.gateway.gateway_process import gateway_process
from tests.histories import opened_history
from tests.history import events as e
from tests.history.test_rows import write
from tests.pgbouncer import HOW_TO_GET, PgBouncer, binary, pgbouncer
from tests.postgres import PostgresServer
from tests.protocol.driving import Queue
from tests.servers import RedisServer
from tests.worker.audit.audits import Scene

pytestmark = [pytest.mark.postgres, pytest.mark.skipif(binary() is None, reason=HOW_TO_GET)]


@pytest.fixture(scope="module")
def pooler(postgres: PostgresServer) -> Generator[PgBouncer]:
    """A pooler of two sessions for each database."""
    with pgbouncer(postgres, num_sessions=2) as running:
        yield running


@pytest.fixture
def pooled_url(pooler: PgBouncer, postgres: PostgresServer) -> str:
    """A database without tables, behind it."""
    return pooler.url(postgres.create_database())


def doctor(url: str) -> list[str]:
    """What the doctor's check of the history finds."""
    site = Site(load_config({}, flags={"history.database_url": url}), {}, get_log(), patience_s=0)
    return [result.found for result in check_history(site)]


class TestGivenAPooledHistory:
    def test_when_two_recorders_write_at_once_then_each_statement_is_known(self, pooled_url: str) -> None:
        with opened_history(pooled_url) as engine:
            migrate(engine)
        begin = threading.Barrier(2)

        def record(tenant: str) -> None:
            with opened_history(pooled_url) as engine:
                begin.wait()
                for number in range(30):  # a driver prepares a statement at its sixth execution
                    write(engine, [e.submitted(f"0.{tenant}.{number}"), e.started(f"0.{tenant}.{number}")])

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(record, ("a", "b")))

        with opened_history(pooled_url) as engine, engine.connect() as connection:
            assert connection.execute(sa.select(sa.func.count()).select_from(jobs)).scalar_one() == 60

    def test_when_a_statement_has_a_time_limit_then_no_other_client_gets_it(self, pooled_url: str) -> None:
        limited = open_database(pooled_url, patience_s=5)
        limits: list[object] = []

        for _ in range(4):
            with limited.connect() as connection:
                limits.append(connection.exec_driver_sql("SHOW statement_timeout").scalar_one())
        with closing(psycopg.connect(pooled_url)) as stranger:
            for _ in range(4):
                limits += stranger.execute("SHOW statement_timeout").fetchone() or ()
                stranger.commit()
        limited.dispose()

        assert limits == ["5s"] * 4 + ["0"] * 4

    def test_when_migrated_then_the_doctor_names_the_pooler(self, pooled_url: str) -> None:
        said: list[str] = []

        code = main(pooled_url, say=said.append)

        assert (code, said) == (ExitCode.DONE, [f"The history is at schema {SCHEMA_REVISION}, was at none."])
        assert [f"schema {SCHEMA_REVISION}, through a connection pooler" in found for found in doctor(pooled_url)] == [
            True
        ]

    def test_when_the_pooler_gives_no_transactions_then_it_is_refused(
        self, postgres: PostgresServer, postgres_url: str
    ) -> None:
        name = postgres_url.split("/")[3].split("?")[0]

        with (
            pgbouncer(postgres, mode="statement") as statements,
            pytest.raises(HistoryRefused, match="transaction blocks not allowed in statement pooling mode"),
        ):
            check_writable(open_database(statements.url(name), is_writer=True))

    def test_when_options_of_the_session_are_given_then_it_is_refused(self, pooled_url: str) -> None:
        url = f"{pooled_url}&options=-csearch_path%3Dsluice"

        with pytest.raises(HistoryRefused, match="unsupported startup parameter: options"):
            check_writable(open_database(url, is_writer=True))


@pytest.mark.slow
class TestGivenAllThatUsesAPooledHistory:
    def test_when_they_run_at_once_then_none_of_them_fails(
        self, pooled_url: str, valkey: RedisServer, tmp_path: Path
    ) -> None:
        with opened_history(pooled_url) as engine, valkey.client() as client:
            migrate(engine)
            queue = Queue(client)
            queue.configure(keep_prompts="full")
            with gateway_process(valkey.url, database_url=pooled_url) as gateway, gateway.http() as http:
                shown: list[int] = []
                for _ in range(12):
                    made = http.post("/jobs", json={"prompt": "x", "batch": "night"})
                    recorders = [_recorder(client, engine, name) for name in ("r1", "r2")]
                    for recorder in recorders:
                        recorder.drain()
                    pages = ("/ui/jobs", "/ui/jobs?state=done", "/ui/tenants", "/ui/batches", "/readyz", "/v1/files")
                    shown += [made.status_code, *(http.get(page).status_code for page in pages)]
            exported = export_batch(engine, BatchJobs("default", "night"), tmp_path)
            scene = Scene(valkey, queue, engine)
            findings = scene.audit().findings
            num_forgotten = forget_before(engine, "default", 1)

        assert set(shown) <= {200, 201, 202}
        assert (exported.num_open + exported.num_done, num_forgotten) == (12, 0)
        assert [str(one.kind) for one in findings] == []


def _recorder(client: object, engine: sa.Engine, name: str) -> Recorder:
    return Recorder(client, HistoryWriter(engine), RecorderSettings(name=name))  # pyright: ignore[reportArgumentType]
