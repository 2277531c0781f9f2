"""No statement of a writer scans a table of jobs, so that none becomes slower as the history grows."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from sluice.gateway.tables.quota import stored_bytes
from sluice.history.retention import erase_prompts_before, forget_before
from sluice.protocol.wire import JobId
from sluice.worker.audit.history_side import HistorySide
from sluice.worker.traces.exporter import read_rows
from tests.history import events as e
from tests.history.test_retention import NOW, no_pause, ran
from tests.history.test_rows import write

SOME = [(JobId("0.a.1"), e.NOON_MS), (JobId("0.a.2"), e.NOON_MS)]
SCAN = re.compile(r"SCAN (jobs|attempts|results)\b")


@contextmanager
def statements_of(engine: Engine) -> Generator[list[tuple[str, Any]]]:
    """Collect what is executed, with its parameters."""
    found: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, is_many: bool) -> None:
        found.append((statement, parameters[0] if is_many else parameters))

    event.listen(engine, "before_cursor_execute", note)
    yield found
    event.remove(engine, "before_cursor_execute", note)


def plans(engine: Engine, statements: list[tuple[str, Any]]) -> list[str]:
    """What the database would do for each statement."""
    with engine.connect() as connection:
        found = [connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {one}", given) for one, given in statements]
        return [line[3] for plan in found for line in plan]


def scans(engine: Engine, statements: list[tuple[str, Any]]) -> list[str]:
    """The plans that read a whole table."""
    found = plans(engine, statements)
    assert any(line.startswith("SEARCH") for line in found)
    return [line for line in found if SCAN.match(line)]


@pytest.fixture
def history(sqlite_history: Engine) -> Engine:
    """One with jobs that ran."""
    write(sqlite_history, [one for number in range(20) for one in ran(f"0.a.{number}", e.NOON_MS, batch=b"b")])
    return sqlite_history


class TestGivenAHistoryOnSqlite:
    def test_when_events_are_written_then_no_table_is_scanned(self, history: Engine) -> None:
        new = [one for name in "xy" for one in ran(f"0.a.{name}", NOW, batch=b"b")]
        back = [e.returned(f"0.a.{number}", NOW, version=9) for number in range(2)]

        with statements_of(history) as statements:
            write(history, [*new, *back])

        assert scans(history, statements) == []

    def test_when_old_rows_go_then_no_table_is_scanned(self, history: Engine) -> None:
        with statements_of(history) as statements:
            assert erase_prompts_before(history, e.QUEUE, NOW, pause=no_pause) == 20
            assert forget_before(history, e.QUEUE, NOW, pause=no_pause) == 20

        assert scans(history, statements) == []

    def test_when_prompts_are_erased_again_then_erased_jobs_are_not_read(self, history: Engine) -> None:
        with statements_of(history) as statements:
            erase_prompts_before(history, e.QUEUE, NOW, pause=no_pause)

        assert any("jobs_with_prompt" in line for line in plans(history, statements))

    def test_when_traces_are_read_then_no_table_is_scanned(self, history: Engine) -> None:
        with statements_of(history) as statements:
            found = read_rows(history, SOME)

        assert [len(claims) for _, claims in found] == [1, 1]
        assert scans(history, statements) == []

    def test_when_what_a_tenant_stores_is_summed_then_its_responses_are_not_read(self, history: Engine) -> None:
        with statements_of(history) as statements, history.connect() as connection:
            stored_bytes(connection, "a")

        assert any(line.startswith("SEARCH responses USING COVERING INDEX") for line in plans(history, statements))

    def test_when_the_audit_resets_rows_then_no_table_is_scanned(self, history: Engine) -> None:
        with statements_of(history) as statements:
            HistorySide(history, e.QUEUE).reset_versions(SOME)

        assert scans(history, statements) == []
