"""The tables on both databases: up, down, and what is said when they do not fit."""

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import OperationalError

from sluice import migrations
from sluice.gateway.tables.quota import RESPONSE_BYTES
from sluice.history import tables
from sluice.history.database import (
    SHARED_VERSION_TABLE,
    VERSION_TABLE,
    BadDatabaseUrl,
    HistoryError,
    HistoryMissing,
    HistoryRefused,
    HistoryUnreachable,
    SchemaTooNew,
    SchemaTooOld,
    check_schema,
    check_writable,
    failure_of,
    open_database,
)
from sluice.history.tables import SCHEMA_REVISION
from sluice.worker.errors import ExitCode
from sluice.worker.recorder.migrate import main, migrate, prepare
from sluice.worker.recorder.recorder import RecorderSettings
from sluice.worker.recorder.recorder import main as record
from tests.history import events as e
from tests.history.test_rows import row, write
from tests.postgres import PostgresServer


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/empty.db"
    return str(request.getfixturevalue("postgres_empty_url"))


@pytest.fixture
def empty(empty_url: str) -> Generator[Engine]:
    """The same, opened."""
    engine = open_database(empty_url, is_writer=True)
    yield engine
    engine.dispose()


def names_in(engine: Engine) -> set[str]:
    """Tables and views."""
    inspector = sa.inspect(engine)
    return {*inspector.get_table_names(), *inspector.get_view_names()} - {VERSION_TABLE, SHARED_VERSION_TABLE}


def check(engine: Engine) -> None:
    """What a reader checks before it asks anything."""
    with engine.connect() as connection:
        check_schema(connection)


def pretend(engine: Engine, revision: str) -> None:
    """Write that another revision is there."""
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = :found"), {"found": revision})


class TestGivenADatabaseWithoutTables:
    """A new one."""

    def test_when_migrated_then_it_is_what_the_tables_declare(self, empty: Engine) -> None:
        before, after = migrate(empty)

        assert (before, after) == (None, SCHEMA_REVISION)
        assert names_in(empty) == {*tables.metadata.tables, *tables.views.tables}
        with empty.connect() as connection:
            context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
            assert compare_metadata(context, tables.metadata) == []

    def test_when_migrated_then_computed_columns_and_views_are_complete(self, empty: Engine) -> None:
        migrate(empty)

        inspector = sa.inspect(empty)
        computed = {column["name"] for column in inspector.get_columns("jobs") if "computed" in column}
        assert computed == {column.name for column in tables.jobs.columns if column.computed is not None}
        for view in tables.views.sorted_tables:
            assert [column["name"] for column in inspector.get_columns(view.name)] == list(view.columns.keys())

    def test_when_migrated_up_and_down_stepwise_then_rows_live_as_long_as_their_tables(self, empty: Engine) -> None:
        migrate(empty)
        write(empty, [e.submitted("0.a.1")])

        assert migrate(empty, "0002") == (SCHEMA_REVISION, "0002")
        assert migrate(empty, "0001") == ("0002", "0001")
        assert names_in(empty) == set(tables.metadata.tables) - {
            *("api_keys", "files", "gateway_batches", "responses"),
            *("page_sessions", "audit_log", "prices"),
        }
        assert migrate(empty) == ("0001", SCHEMA_REVISION)
        assert row(empty, "0.a.1")["state"] == "queued"

        migrate(empty, "0001")

        assert migrate(empty, "base") == ("0001", None)
        assert names_in(empty) == set()
        assert migrate(empty) == (None, SCHEMA_REVISION)

    def test_when_a_refused_job_has_the_estimate_then_the_migration_removes_it(self, empty: Engine) -> None:
        migrate(empty, "0015")
        columns = "id, queue, partition, tenant, submitted_ms, version, state, model, prompt_tokens, scheduled_ms"
        rows = (
            "('0.a.no', 'q', 0, 'a', 1, 3, 'failed', 'm', 4500, NULL, 9)",
            "('0.a.yes', 'q', 0, 'a', 1, 3, 'done', 'm', 12, 2, 9)",
        )
        with empty.begin() as connection:
            for values in rows:
                connection.exec_driver_sql(f"INSERT INTO jobs ({columns}, finished_ms) VALUES {values}")
            connection.exec_driver_sql("INSERT INTO prices VALUES ('m', 0, 1000000.0, 1.0, 1.0, 'EUR')")

        migrate(empty)

        with empty.connect() as connection:
            costs = dict(map(tuple, connection.execute(sa.select(tables.job_costs.c.id, tables.job_costs.c.cost))))
            usage = connection.execute(sa.select(tables.hourly_usage.c.prompt_tokens, tables.hourly_usage.c.cost)).one()
        assert costs == {"0.a.no": 0, "0.a.yes": 12}
        assert tuple(usage) == (12, 12)

    def test_when_responses_are_kept_then_the_migration_counts_their_bytes(self, empty: Engine) -> None:
        migrate(empty, "0016")
        columns = "tenant, queue, job_id, created_ms, expires_ms, depth, is_background, model, digest, status"
        with empty.begin() as connection:
            for name, output in (("open", None), ("ended", '"\N{SNOWMAN}"')):
                connection.execute(
                    sa.text(
                        f"INSERT INTO responses (id, {columns}, options, input, output)"
                        " VALUES (:id, 'a', 'q', 'j', 1, 2, 0, FALSE, 'm', 'd', 'open', '{}', '[\"xyz\"]', :output)"
                    ),
                    {"id": name, "output": output},
                )

        migrate(empty)

        with empty.connect() as connection:
            found = dict(map(tuple, connection.execute(sa.select(tables.responses.c.id, tables.responses.c.bytes))))
        assert found == {"open": RESPONSE_BYTES + 2 + 7, "ended": RESPONSE_BYTES + 2 + 7 + 5}

    def test_when_migrated_twice_then_the_second_changes_nothing(self, empty: Engine) -> None:
        migrate(empty)
        write(empty, [e.submitted("0.a.1")])

        assert migrate(empty) == (SCHEMA_REVISION, SCHEMA_REVISION)
        assert row(empty, "0.a.1")["state"] == "queued"

    def test_when_two_migrate_at_once_then_both_succeed(self, empty_url: str) -> None:
        def once(_: int) -> str | None:
            engine = open_database(empty_url, is_writer=True)
            try:
                return migrate(engine)[1]
            finally:
                engine.dispose()

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(once, range(4))) == [SCHEMA_REVISION] * 4

    def test_when_a_reader_looks_then_it_hears_that_there_is_no_history(self, empty: Engine) -> None:
        with pytest.raises(HistoryMissing, match="worker migrate"):
            check(empty)

    def test_when_the_worker_migrates_then_it_says_so(self, empty_url: str) -> None:
        messages: list[str] = []

        assert main(empty_url, say=messages.append) == ExitCode.DONE
        assert main(empty_url, say=messages.append) == ExitCode.DONE
        assert messages == [
            f"The history is at schema {SCHEMA_REVISION}, was at none.",
            f"The history is at schema {SCHEMA_REVISION}.",
        ]

    @pytest.mark.parametrize("revision", ["foo", "14", "0000", "9999", "head", ""])
    def test_when_the_revision_is_unknown_then_it_says_which_there_are(self, tmp_path: Path, revision: str) -> None:
        messages: list[str] = []

        code = main(f"sqlite:///{tmp_path}/new.db", revision=revision, say=messages.append)

        assert code == ExitCode.MISUSED
        assert messages == [f"there is no schema {revision!r}: give base, or one of 0001 to {SCHEMA_REVISION}"]
        assert not (tmp_path / "new.db").exists()

    @pytest.mark.parametrize("revision", ["base", "0001"])
    def test_when_an_old_revision_is_named_then_it_is_migrated_to_that(self, tmp_path: Path, revision: str) -> None:
        messages: list[str] = []

        code = main(f"sqlite:///{tmp_path}/new.db", revision=revision, say=messages.append)

        assert (code, len(messages)) == (ExitCode.DONE, 1)


class TestGivenAHistoryOfOneRowPerJob:
    """Schema 0005, with a job that ran, and one that was deleted before its row was written."""

    def test_when_migrated_up_and_down_then_rows_stay_and_the_newest_submission_is_kept(self, empty: Engine) -> None:
        migrate(empty, "0005")
        job = "INSERT INTO jobs (id, queue, partition, tenant, version, state, submitted_ms, finished_ms, metadata)"
        with empty.begin() as connection:
            for statement in (
                f"{job} VALUES ('0.a.1', 'q', 0, 'a', 3, 'done', 1000, 5000, '{{}}')",
                f"{job} VALUES ('0.a.2', 'q', 0, 'a', 0, 'done', NULL, NULL, NULL)",
                "INSERT INTO attempts (job_id, epoch, started_ms, outcome) VALUES ('0.a.1', 1, 2000, 'done')",
                "INSERT INTO results (job_id, version, finished_ms, choices, usage)"
                " VALUES ('0.a.1', 3, 5000, '[]', '{}')",
            ):
                connection.exec_driver_sql(statement)

        migrate(empty)
        write(empty, [e.submitted("0.a.1"), e.started("0.a.1")])

        assert self.times(empty, "jobs") == [0, 1000, e.NOON_MS]
        assert self.times(empty, "attempts") == [1000, e.NOON_MS]
        assert self.times(empty, "results") == [1000]
        with empty.connect() as connection:
            assert connection.scalar(sa.text("SELECT e2e_s FROM jobs WHERE submitted_ms = 1000")) == 4.0
        migrate(empty, "0005")
        assert self.times(empty, "jobs") == [0, e.NOON_MS]
        with empty.connect() as connection:
            assert connection.scalars(sa.text("SELECT started_ms FROM attempts")).all() == [e.NOON_MS + 40]
            assert connection.scalars(sa.text("SELECT version FROM results")).all() == []

    def times(self, engine: Engine, table: str) -> list[int]:
        with engine.connect() as connection:
            return list(connection.scalars(sa.text(f"SELECT submitted_ms FROM {table} ORDER BY submitted_ms")))


class TestGivenAWorkerThatStarts:
    """SQLite migrates itself; PostgreSQL is migrated by a person."""

    def test_when_sqlite_is_new_then_it_is_migrated(self, tmp_path: Path) -> None:
        engine = open_database(f"sqlite:///{tmp_path}/new.db", is_writer=True)

        prepare(engine)

        check(engine)
        engine.dispose()

    def test_when_postgres_is_new_then_it_is_left_alone(self, postgres_empty_url: str) -> None:
        engine = open_database(postgres_empty_url, is_writer=True)

        with pytest.raises(HistoryMissing):
            prepare(engine)

        assert names_in(engine) == set()
        engine.dispose()

    def test_when_postgres_is_older_then_it_says_what_to_run(self, postgres_empty_url: str) -> None:
        engine = open_database(postgres_empty_url, is_writer=True)
        migrate(engine, "0001")

        with pytest.raises(SchemaTooOld, match=rf"0001.*{SCHEMA_REVISION}.*worker migrate"):
            prepare(engine)

        engine.dispose()

    def test_when_the_schema_is_newer_then_it_stays_as_it_is(self, history: Engine) -> None:
        pretend(history, "9999")

        for use in (prepare, migrate, check):
            with pytest.raises(SchemaTooNew, match=r"9999.*update"):
                use(history)

    def test_when_the_schema_is_newer_then_the_recorder_stops_and_says_so(self, sqlite_history: Engine) -> None:
        pretend(sqlite_history, "9999")
        url = sqlite_history.url.render_as_string()

        assert record(redis_url="unix:///nowhere", database_url=url, settings=RecorderSettings()) == ExitCode.MISUSED


def versions_in(engine: Engine, table: str) -> list[str] | None:
    """What a version table has; None without one."""
    with engine.connect() as connection:
        if not sa.inspect(connection).has_table(table):
            return None
        return [str(one) for one in connection.execute(sa.text(f"SELECT version_num FROM {table}")).scalars()]


class TestGivenADatabaseWithAnotherProgramsTables:
    """One that uses Alembic too, under Alembic's own name; or one that has tables of ours' names."""

    @pytest.mark.parametrize("version", ["0003", "0015", "9999", "ae1027a6"])
    def test_when_it_uses_alembic_too_then_neither_reads_the_other_s_version(self, empty: Engine, version: str) -> None:
        with empty.begin() as connection:
            connection.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
            connection.execute(sa.text(f"INSERT INTO alembic_version VALUES ('{version}')"))
            connection.execute(sa.text("CREATE TABLE theirs (id BIGINT)"))

        migrated = migrate(empty)
        check(empty)
        back = migrate(empty, "0015")

        assert (migrated, back) == ((None, SCHEMA_REVISION), (SCHEMA_REVISION, "0015"))
        assert versions_in(empty, SHARED_VERSION_TABLE) == [version]
        assert versions_in(empty, VERSION_TABLE) == ["0015"]

    def test_when_its_tables_have_our_names_then_it_is_refused_and_unchanged(self, empty: Engine) -> None:
        with empty.begin() as connection:
            connection.execute(sa.text("CREATE TABLE files (path TEXT)"))

        with pytest.raises(HistoryRefused, match=r"tables of another program .*files.* already exists.*of its own"):
            migrate(empty)

        assert names_in(empty) == {"files"}

    def test_when_ours_has_alembic_s_name_then_it_moves_and_moves_back(self, empty: Engine) -> None:
        migrate(empty, "0007")
        older = versions_in(empty, SHARED_VERSION_TABLE), versions_in(empty, VERSION_TABLE)

        with pytest.raises(SchemaTooOld, match="0007"):
            check(empty)
        migrated = migrate(empty)
        newer = versions_in(empty, SHARED_VERSION_TABLE), versions_in(empty, VERSION_TABLE)
        check(empty)

        assert migrated == ("0007", SCHEMA_REVISION)
        assert (older, newer) == ((["0007"], None), (None, [SCHEMA_REVISION]))

    def test_when_ours_is_in_a_schema_then_the_other_s_tables_are_no_matter(self, postgres_empty_url: str) -> None:
        engine = open_database(f"{postgres_empty_url}&options=-csearch_path%3Dsluice", is_writer=True)
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE SCHEMA sluice"))
            connection.execute(sa.text("CREATE TABLE public.files (path TEXT)"))

        migrated = migrate(engine)
        check(engine)
        write(engine, [e.submitted("0.a.1")])

        assert migrated == (None, SCHEMA_REVISION)
        assert row(engine, "0.a.1")["state"] == "queued"
        engine.dispose()


class TestGivenADatabaseThatIsAway:
    """Not there, or not ours."""

    def test_when_postgres_does_not_answer_then_the_error_has_no_password(self, tmp_path: Path) -> None:
        messages: list[str] = []

        code = main(f"postgresql://me:s3cret@/db?host={tmp_path}", say=messages.append)

        assert code == ExitCode.NOT_READY
        assert len(messages) == 1
        assert "s3cret" not in messages[0]

    @pytest.mark.parametrize("use", [prepare, check_writable])
    def test_when_the_sqlite_folder_is_missing_then_it_is_refused(
        self, tmp_path: Path, use: Callable[[Engine], None]
    ) -> None:
        engine = open_database(f"sqlite:///{tmp_path}/no/such/folder.db", is_writer=True)

        with pytest.raises(HistoryRefused, match=r"folder\.db cannot be used as a SQLite database"):
            use(engine)

    def test_when_a_file_is_no_database_then_it_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "history.db"
        path.write_text("not a database " * 100)

        with pytest.raises(HistoryRefused, match="file is not a database"):
            check_writable(open_database(f"sqlite:///{path}", is_writer=True))

    def test_when_sqlite_is_checked_before_it_exists_then_nothing_is_created(self, tmp_path: Path) -> None:
        check_writable(open_database(f"sqlite:///{tmp_path}/history.db", is_writer=True))

        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("url", ["mysql://host/db", "history.db", "", "postgresql+asyncpg://host/db"])
    def test_when_the_url_is_of_something_else_then_it_says_what_is_expected(self, url: str) -> None:
        with pytest.raises(BadDatabaseUrl, match="expected sqlite:///FILE or postgresql://USER@HOST/NAME"):
            open_database(url)

    @pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
    def test_when_the_url_is_postgres_in_any_spelling_then_psycopg_3_is_used(self, scheme: str) -> None:
        assert open_database(f"{scheme}://host/db").driver == "psycopg"


def test_the_newest_step_is_the_schema_that_the_tables_name() -> None:
    steps = ScriptDirectory(str(Path(migrations.__file__).parent))

    assert steps.get_current_head() == SCHEMA_REVISION


@pytest.mark.slow
def test_when_installed_as_a_wheel_is_then_the_steps_are_found(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    sources: dict[str, str] = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]["sources"]
    for folder in sources:
        installed = tmp_path / "site" / sources[folder]
        shutil.copytree(root / folder, installed, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "site/sluice/__init__.py").touch()
    program = "from sluice.worker.recorder.migrate import main; "
    program += f"raise SystemExit(main('sqlite:///{tmp_path}/history.db', say=print))"

    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"The history is at schema {SCHEMA_REVISION}, was at none.\n"


class TestGivenAPostgresThatRefuses:
    """Its sentences are fatal; all else is an outage."""

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            (("/postgres?", "/nowhere?"), 'database "nowhere" does not exist'),
            (("//postgres:", "//stranger:"), 'role "stranger" does not exist'),
        ],
    )
    def test_when_the_url_is_wrong_then_it_is_refused(
        self, postgres: PostgresServer, change: tuple[str, str], sentence: str
    ) -> None:
        url = postgres.url("postgres").replace(*change)

        with pytest.raises(HistoryRefused, match=f"refuses the connection: {sentence}"):
            check_writable(open_database(url, is_writer=True))

    @pytest.mark.parametrize(
        ("message", "kind"),
        [
            ('FATAL:  password authentication failed for user "bob"', HistoryRefused),
            ('FATAL:  permission denied for database "d1"', HistoryRefused),
            ('FATAL:  no pg_hba.conf entry for host "[local]", user "zoe"', HistoryRefused),
            ("fe_sendauth: no password supplied", HistoryRefused),
            ("FATAL:  no such user: bob", HistoryRefused),
            ("FATAL:  unsupported startup parameter: options", HistoryRefused),
            ("server does not support SSL, but SSL was required", HistoryRefused),
            ('root certificate file "/nope" does not exist', HistoryRefused),
            ('definition of service "x" not found', HistoryRefused),
            ("FATAL:  server login has been failing, try again later (server_login_retry)", HistoryUnreachable),
            ("FATAL:  the database system is starting up", HistoryUnreachable),
            ("FATAL:  sorry, too many clients already", HistoryUnreachable),
            ("Connection refused", HistoryUnreachable),
        ],
    )
    def test_when_it_answers_then_the_answer_decides(self, message: str, kind: type[HistoryError]) -> None:
        # As psycopg raises it: without an SQLSTATE.
        cause = psycopg.OperationalError(f"connection failed: connection to server failed: {message}")

        assert type(failure_of(OperationalError(None, None, cause), make_url("postgresql://db/x"))) is kind


def test_when_migrated_then_postgres_describes_each_table_view_and_column(postgres_url: str) -> None:
    engine, described = open_database(postgres_url), dict[str, str | None]()

    inspector = sa.inspect(engine)
    for table in (*tables.metadata.sorted_tables, *tables.views.sorted_tables):
        described[table.name] = inspector.get_table_comment(table.name)["text"]
        found = inspector.get_columns(table.name)
        described |= {f"{table.name}.{column['name']}": column.get("comment") for column in found}
    engine.dispose()

    declared = (*tables.metadata.sorted_tables, *tables.views.sorted_tables)
    assert described == {table.name: table.comment for table in declared} | {
        f"{table.name}.{column.name}": column.comment for table in declared for column in table.columns
    }
    assert None not in described.values()
