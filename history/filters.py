"""Select jobs of the history, and continue a list of them. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from sluice.history.tables import AnyColumn, jobs

AnyQuery = sa.Select[*tuple[Any, ...]]  # Any: a row's values are as its columns say

QueueNames: TypeAlias = str | Sequence[str]
"""One queue, or several: a job is known by its queue and its id."""

_MAX_TIME_DIGITS = 15


class JobPlace(NamedTuple):
    """A place in a list of jobs, newest first: that of a job which the reader has. Its `str()` stands in addresses."""

    submitted_ms: int
    job_id: str

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Parse a place; None if the text is not one."""
        at_ms, _, job_id = text.partition(":")
        is_time = at_ms.isascii() and at_ms.isdigit() and len(at_ms) <= _MAX_TIME_DIGITS
        return cls(int(at_ms), job_id) if is_time else None

    def __str__(self) -> str:
        return f"{self.submitted_ms}:{self.job_id}"

    @property
    def clauses(self) -> Sequence[sa.ColumnElement[bool]]:
        """Conditions on the table `jobs` that the jobs after it meet."""
        is_same = sa.and_(jobs.c.submitted_ms == self.submitted_ms, jobs.c.id > self.job_id)
        # The first condition says nothing more, but is one that an index serves.
        return jobs.c.submitted_ms <= self.submitted_ms, sa.or_(jobs.c.submitted_ms < self.submitted_ms, is_same)


class _NotIndexed(FunctionElement[str]):
    """A column by whose index SQLite must not search: it may know too little of the values to choose. Others choose."""

    inherit_cache = True
    type = sa.String()


@compiles(_NotIndexed)
def _column(element: _NotIndexed, compiler: SQLCompiler, **more: Any) -> str:  # noqa: ANN401  # SQLAlchemy's own
    [column] = element.clauses
    return compiler.process(column, **more)


@compiles(_NotIndexed, "sqlite")
def _column_of_sqlite(element: _NotIndexed, compiler: SQLCompiler, **more: Any) -> str:  # noqa: ANN401  # as above
    return f"+{_column(element, compiler, **more)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """A selection of jobs; None means any."""

    queue: QueueNames | None = None

    batch: str | Sequence[str] | None = None
    """One batch, or several."""

    state: str | None = None
    tenant: str | None = None
    priority: int | None = None
    error_code: str | None = None
    since_ms: int | None = None
    """Earliest time of submission."""

    after: JobPlace | None = None
    """The place of the job before."""

    def clauses(self) -> list[sa.ColumnElement[bool]]:
        """Return conditions on the table `jobs`."""
        queue: sa.ColumnElement[str] = jobs.c.queue
        kinds: dict[sa.ColumnElement[str], str | None]
        kinds = {jobs.c.state: self.state, jobs.c.tenant: self.tenant, jobs.c.error_code: self.error_code}
        # A queue may have most jobs, and a state or tenant too. The index of batches begins with the queue.
        if self.queue is not None and self.batch is not None:
            kinds = {_NotIndexed(column): value for column, value in kinds.items()}
        elif self._is_selective:
            queue = _NotIndexed(queue)
        conditions = ((queue, self.queue), (jobs.c.batch, self.batch), (jobs.c.priority, self.priority), *kinds.items())
        clauses = [is_in(column, value) for column, value in conditions if value is not None]
        if self.since_ms is not None:
            clauses.append(jobs.c.submitted_ms >= self.since_ms)
        return [*clauses, *(self.after.clauses if self.after is not None else ())]

    @property
    def _is_selective(self) -> bool:
        """Whether it selects few jobs of a queue, by a column with an index. Most jobs are done."""
        return any(value is not None for value in (self.tenant, self.error_code)) or self.state not in (None, "done")

    def newest_first(self, columns: Sequence[AnyColumn]) -> AnyQuery:
        """Return a query of these columns of the jobs, newest first."""
        # Several batches must be sorted: an index in this order would be that of the whole queue.
        is_sorted = self.batch is None or isinstance(self.batch, str)
        time = jobs.c.submitted_ms if is_sorted else jobs.c.submitted_ms + 0
        return sa.select(*columns).where(*self.clauses()).order_by(time.desc(), jobs.c.id)


def is_in(column: sa.ColumnElement[Any], values: str | int | Sequence[str]) -> sa.ColumnElement[bool]:  # Any: a type
    """Return the condition that a column has a value, or one of several."""
    return column == values if isinstance(values, (str, int)) else column.in_(values)
