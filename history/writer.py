"""Write changes to the history, independent of their order and repetition. Knows no Redis.

A transaction holds many jobs. A row that SQL refuses is found by bisection, cleaned, and stored with the reason. A
database that is unreachable, full or damaged raises HistoryAway instead.

HistoryAway   the database accepts no writes now; retry the same changes later
"""

import math
import re
import sqlite3
from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, DisconnectionError, IntegrityError, SQLAlchemyError

from sluice.history.database import JsonText, why
from sluice.history.rows import IDENTITY, JobChange, Row, Submission
from sluice.history.tables import batches, jobs, of_submissions, results
from sluice.history.upserts import Upserts

BatchName = tuple[str, str]
"""(queue, batch)."""

MAX_JOBS_PER_TRANSACTION = 1000
MAX_TEXT_CHARS = 1_000_000
"""Maximum length of a cleaned text. Valid texts are never truncated."""

_SQLSTATES_OF_ROWS = ("22", "23", "54", "42804", "42846")
"""PostgreSQL's codes: data exception, integrity, program limit (a text too long for an index), wrong type (two)."""

_MISUSES = (sqlite3.InterfaceError, sqlite3.ProgrammingError)

# For values that they cannot send, drivers raise OverflowError, UnicodeEncodeError, TypeError and others.
_REFUSALS = (SQLAlchemyError, ValueError, TypeError, ArithmeticError, RecursionError)


class HistoryAway(Exception):
    """The database is unreachable, locked, read-only, full or damaged. The write must be retried."""


class HistoryWriter:
    """A writer of changes into one database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._upserts = Upserts(engine.dialect.name)

    def write(self, changes: Iterable[JobChange]) -> list[tuple[str, str]]:
        """Write changes, each completely or not at all. Return (job id, reason) of those that had to be cleaned.

        Raises:
            HistoryAway: some changes were not written; write all of them again.
        """
        # Sorted, because one lock order for all writers prevents deadlocks.
        ordered = sorted(changes, key=lambda change: change.submission)
        cleaned: list[tuple[str, str]] = []
        for start in range(0, len(ordered), MAX_JOBS_PER_TRANSACTION):
            cleaned += self._write_halving(ordered[start : start + MAX_JOBS_PER_TRANSACTION])
        return cleaned

    def _write_halving(self, changes: Sequence[JobChange]) -> list[tuple[str, str]]:
        try:
            self._write_all(changes)
        except _REFUSALS as refusal:
            if len(changes) == 1:
                return [self._write_cleaned(changes[0], refusal)]
            middle = len(changes) // 2
            return self._write_halving(changes[:middle]) + self._write_halving(changes[middle:])
        return []

    def _write_cleaned(self, change: JobChange, refusal: Exception) -> tuple[str, str]:
        reason = _reason(refusal)
        for smaller in (_cleaned, _skeleton):
            try:
                self._write_all([smaller(change, reason)])
            except _REFUSALS as again:
                reason = _reason(again)
            else:
                return change.submission[0], reason
        # A skeleton contains no data of the job, so the database would refuse any row.
        raise HistoryAway(f"not even the state of job {change.submission[0]} can be stored: {reason}")

    def _write_all(self, changes: Sequence[JobChange]) -> None:
        try:
            with self._engine.begin() as connection:
                self._execute(connection, changes)
        except (DBAPIError, DisconnectionError) as error:
            if _is_rows_fault(error):
                raise
            raise HistoryAway(_reason(error)) from error

    def _execute(self, connection: Connection, changes: Sequence[JobChange]) -> None:
        upserts, claims = self._upserts, [row for change in changes for _, row in sorted(change.attempts.items())]
        results_rows = [change.result for change in changes if change.result is not None]
        upserts.jobs(connection, [change.job for change in changes])
        upserts.attempts(connection, claims)
        upserts.results(connection, results_rows)
        if results_rows:
            _forget_deleted(connection, [(row["job_id"], row["submitted_ms"]) for row in results_rows])
        upserts.batches(connection, _batches_of(changes))
        returned = [change.submission for change in changes if change.is_returned]
        if returned:
            _reopen_batches(connection, returned)

    def open_batches(self) -> list[BatchName]:
        """List batches with open jobs or with counters that may be outdated.

        Raises:
            HistoryAway: the database does not answer.
        """
        query = sa.select(batches.c.queue, batches.c.id).where(batches.c.completed_ms.is_(None))
        try:
            with self._engine.connect() as connection:
                return [(str(row.queue), str(row.id)) for row in connection.execute(query)]
        except DBAPIError as error:
            raise HistoryAway(_reason(error)) from error

    def count_batch(self, name: BatchName, *, now_ms: int) -> None:
        """Count the jobs of a batch by state. It is complete if none is queued or running.

        Raises:
            HistoryAway: the database does not answer.
        """
        try:
            with self._engine.begin() as connection:
                _count_batch(connection, name, now_ms)
        except DBAPIError as error:
            raise HistoryAway(_reason(error)) from error


# ---------------------------------------------------------------- what else a transaction does


# Built once: that costs more than running it.
_DELETED = sa.select(jobs.c.id, jobs.c.submitted_ms).where(
    of_submissions(jobs, sa.bindparam("submissions", expanding=True), sa.bindparam("ids", expanding=True)),
    jobs.c.deleted_ms.is_not(None),
)
_FORGET_DELETED = results.delete().where(sa.tuple_(results.c.job_id, results.c.submitted_ms).in_(_DELETED))


def _forget_deleted(connection: Connection, submissions: Sequence[tuple[object, object]]) -> None:
    """Delete results of deleted jobs, which a late event would bring back."""
    connection.execute(_FORGET_DELETED, {"submissions": submissions, "ids": [job_id for job_id, _ in submissions]})


def _reopen_batches(connection: Connection, submissions: Sequence[Submission]) -> None:
    is_returned = of_submissions(jobs, submissions)
    touched = sa.select(jobs.c.queue, jobs.c.batch).where(is_returned, jobs.c.batch.is_not(None)).distinct()
    for queue, batch in sorted(map(tuple, connection.execute(touched))):
        same = sa.and_(batches.c.queue == queue, batches.c.id == batch)
        connection.execute(batches.update().where(same).values(completed_ms=None))


def _batches_of(changes: Sequence[JobChange]) -> list[Row]:
    created: dict[tuple[str, str], int] = {}
    for change in changes:
        queue, batch, at_ms = (change.job[name] for name in ("queue", "batch", "submitted_ms"))
        if isinstance(batch, str) and isinstance(queue, str) and isinstance(at_ms, int):
            created[queue, batch] = min(at_ms, created.get((queue, batch), at_ms))
    return [{"queue": queue, "id": batch, "created_ms": at_ms} for (queue, batch), at_ms in sorted(created.items())]


def _count_batch(connection: Connection, name: BatchName, now_ms: int) -> None:
    queue, batch = name
    same = sa.and_(batches.c.queue == queue, batches.c.id == batch)
    # A concurrent change waits for this lock and reopens the batch after this count.
    connection.execute(sa.select(batches.c.id).where(same).with_for_update())
    mine = sa.and_(jobs.c.queue == queue, jobs.c.batch == batch)
    counted = connection.execute(sa.select(jobs.c.state, sa.func.count()).where(mine).group_by(jobs.c.state))
    counts = {str(state): int(count) for state, count in counted}
    totals = {name: counts.get(name, 0) for name in ("queued", "running", "done", "failed", "cancelled", "expired")}
    completed_ms = None
    if totals["queued"] + totals["running"] == 0:
        completed_ms = connection.execute(sa.select(sa.func.max(jobs.c.finished_ms)).where(mine)).scalar_one()
    values = totals | {"jobs": sum(counts.values()), "completed_ms": completed_ms, "refreshed_ms": now_ms}
    connection.execute(batches.update().where(same).values(**values))


# ---------------------------------------------------------------- rows that SQL refuses


def _is_rows_fault(error: SQLAlchemyError) -> bool:
    """Return whether a bad value caused the error, not a lost connection, a full disk or a damaged file."""
    if not isinstance(error, DBAPIError) or error.connection_invalidated:
        return False
    sqlstate = getattr(error.orig, "sqlstate", None)
    if isinstance(sqlstate, str):
        return sqlstate.startswith(_SQLSTATES_OF_ROWS)
    # SQLite's driver raises a misuse error for a value that it cannot bind.
    return isinstance(error, (DataError, IntegrityError)) or isinstance(error.orig, _MISUSES)


def _reason(error: Exception) -> str:
    return why(error) if isinstance(error, SQLAlchemyError) else f"{type(error).__name__}: {error}"[:500]


def _cleaned(change: JobChange, reason: str) -> JobChange:
    return JobChange(
        job=_clean_row(change.job) | {"record_error": reason},
        attempts={epoch: _clean_row(row) for epoch, row in change.attempts.items() if _fits(epoch)},
        result=None if change.result is None else _clean_row(change.result),
        is_returned=change.is_returned,
    )


def _skeleton(change: JobChange, reason: str) -> JobChange:
    """Reduce a change to the job's identity, version and state."""
    kept = {name: _clean(change.job[name]) for name in (*IDENTITY, "version", "state")}
    return JobChange(job=dict.fromkeys(change.job) | kept | {"record_error": reason})


def _clean_row(row: Row) -> Row:
    return {name: _clean(value) for name, value in row.items()}


def _clean(value: object) -> object:
    """Return a value that every database accepts: without NUL, lone surrogates and numbers out of range."""
    match value:
        case str():
            return value.encode(errors="replace").decode().replace("\0", "\ufffd")[:MAX_TEXT_CHARS]
        case bool() | None:
            return value
        case int():
            return value if _fits(value) else None
        case float():
            return value if math.isfinite(value) else None
        case JsonText():
            return JsonText(_NUL.sub(r"\1\\ufffd", value.text))
        case dict():
            return {_clean(key): _clean(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]  # JSON of any shape
        case list() | tuple():
            return [_clean(item) for item in value]  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]  # JSON of any shape
        case _:
            return str(value)


_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
"""NUL in JSON text: after an even number of backslashes."""


def _fits(number: int) -> bool:
    return -(2**63) <= number < 2**63
