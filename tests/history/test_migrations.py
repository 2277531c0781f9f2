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
from sluice.history.database import (
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
from sluice.history.tables import SCHEMA_REVISION, jobs, metadata
from sluice.history.views import views
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
    return {*inspector.get_table_names(), *inspector.get_view_names()} - {VERSION_TABLE}


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
        assert names_in(empty) == {*metadata.tables, *views.tables}
        with empty.connect() as connection:
            context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
            assert compare_metadata(context, metadata) == []

    def test_when_migrated_then_computed_columns_and_views_are_complete(self, empty: Engine) -> None:
        migrate(empty)

        inspector = sa.inspect(empty)
        computed = {column["name"] for column in inspector.get_columns("jobs") if "computed" in column}
        assert computed == {column.name for column in jobs.columns if column.computed is not None}
        for view in views.sorted_tables:
            assert [column["name"] for column in inspector.get_columns(view.name)] == list(view.columns.keys())

    def test_when_migrated_to_base_then_nothing_is_left(self, empty: Engine) -> None:
        migrate(empty)
        write(empty, [e.submitted("0.a.1")])

        assert migrate(empty, "base") == (SCHEMA_REVISION, None)
        assert names_in(empty) == set()
        assert migrate(empty) == (None, SCHEMA_REVISION)

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

    def test_when_the_schema_is_of_a_development_version_then_it_stays_as_it_is(self, history: Engine) -> None:
        pretend(history, "0016")

        for use in (prepare, migrate, check, check_writable):
            with pytest.raises(SchemaTooOld, match=rf"0016 .*cannot be migrated to {SCHEMA_REVISION}: use an empty"):
                use(history)

    def test_when_the_schema_is_newer_then_it_stays_as_it_is(self, history: Engine) -> None:
        pretend(history, "9999")

        for use in (prepare, migrate, check):
            with pytest.raises(SchemaTooNew, match=r"9999.*update"):
                use(history)

    def test_when_the_schema_is_newer_then_the_recorder_stops_and_says_so(self, sqlite_history: Engine) -> None:
        pretend(sqlite_history, "9999")
        url = sqlite_history.url.render_as_string()

        assert record(redis_url="unix:///nowhere", database_url=url, settings=RecorderSettings()) == ExitCode.MISUSED


class TestGivenADatabaseWithAnotherProgramsTables:
    """One that uses Alembic too, under Alembic's own name; or one that has tables of ours' names."""

    def test_when_it_uses_alembic_too_then_neither_reads_the_other_s_version(self, empty: Engine) -> None:
        with empty.begin() as connection:
            connection.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
            connection.execute(sa.text("INSERT INTO alembic_version VALUES ('9999')"))

        migrated = migrate(empty)
        check(empty)
        back = migrate(empty, "base")

        assert (migrated, back) == ((None, SCHEMA_REVISION), (SCHEMA_REVISION, None))
        assert names_in(empty) == {"alembic_version"}
        with empty.connect() as connection:
            assert connection.scalar(sa.text("SELECT version_num FROM alembic_version")) == "9999"

    def test_when_its_tables_have_our_names_then_it_is_refused_and_unchanged(self, empty: Engine) -> None:
        with empty.begin() as connection:
            connection.execute(sa.text("CREATE TABLE files (path TEXT)"))

        with pytest.raises(HistoryRefused, match=r"tables of another program .*files.* already exists.*of its own"):
            migrate(empty)

        assert names_in(empty) == {"files"}

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
    for table in (*metadata.sorted_tables, *views.sorted_tables):
        described[table.name] = inspector.get_table_comment(table.name)["text"]
        found = inspector.get_columns(table.name)
        described |= {f"{table.name}.{column['name']}": column.get("comment") for column in found}
    engine.dispose()

    declared = (*metadata.sorted_tables, *views.sorted_tables)
    assert described == {table.name: table.comment for table in declared} | {
        f"{table.name}.{column.name}": column.comment for table in declared for column in table.columns
    }
    assert None not in described.values()
