"""Read jobs from the history, in pages. Knows no Redis."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from sluice.history.database import HistoryError, HistoryMissing, check_schema, opened_database, why
from sluice.history.rows import Submission
from sluice.history.tables import AnyRow, jobs, of_submissions
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from sluice.worker.audit.findings import HistoryRow
from sluice.worker.audit.queue_side import in_slices
from sluice.worker.errors import ConfigError, NotReady

OPEN_STATES = (JobState.QUEUED, JobState.RUNNING)
ROWS_AT_ONCE = 500


class HistorySide:
    """The rows of one queue."""

    def __init__(self, engine: Engine, queue: str) -> None:
        self.engine = engine
        self._queue = queue

    def rows_of(self, job_ids: Iterable[JobId]) -> dict[JobId, list[HistoryRow]]:
        """Return the rows of these jobs: one for each submission, the newest first."""
        rows: dict[JobId, list[HistoryRow]] = {}
        for ids in in_slices(job_ids, ROWS_AT_ONCE):
            columns = (jobs.c.id, jobs.c.state, jobs.c.version, jobs.c.submitted_ms, jobs.c.deleted_ms)
            query = sa.select(*columns).where(jobs.c.id.in_(ids), jobs.c.queue == self._queue)
            with self.engine.connect() as connection:
                for row in connection.execute(query.order_by(jobs.c.id, jobs.c.submitted_ms.desc())):
                    rows.setdefault(JobId(row.id), []).append(_row(row))
        return rows

    def reset_versions(self, submissions: Sequence[Submission]) -> None:
        """Let any event change these rows."""
        with self.engine.begin() as connection:
            connection.execute(jobs.update().where(of_submissions(jobs, submissions)).values(version=0))

    def open_jobs(self, partition: int) -> Iterator[JobId]:
        """Iterate over the jobs that are queued or running in the history."""
        query = sa.select(jobs.c.id).where(
            jobs.c.queue == self._queue,
            jobs.c.partition == partition,
            jobs.c.state.in_(OPEN_STATES),
            jobs.c.deleted_ms.is_(None),
        )
        with self.engine.connect() as connection:
            rows = connection.execution_options(yield_per=ROWS_AT_ONCE).execute(query)
            yield from (JobId(job_id) for (job_id,) in rows)

    def first_pull_ms(self, partition: int) -> int | None:
        """Return when a worker pulled the oldest job that was ever pulled."""
        mine = sa.and_(jobs.c.queue == self._queue, jobs.c.partition == partition, jobs.c.pulled_ms.is_not(None))
        query = sa.select(jobs.c.pulled_ms).where(mine).order_by(jobs.c.submitted_ms).limit(1)
        with self.engine.connect() as connection:
            return connection.execute(query).scalar_one_or_none()

    def totals(self) -> Mapping[str, int]:
        """Count jobs by state."""
        query = sa.select(jobs.c.state, sa.func.count()).where(jobs.c.queue == self._queue).group_by(jobs.c.state)
        with self.engine.connect() as connection:
            return {str(state): int(count) for state, count in connection.execute(query)}


def _row(row: AnyRow) -> HistoryRow:
    return HistoryRow(
        state=JobState(row.state),
        version=row.version,
        submitted_ms=row.submitted_ms,
        is_deleted=row.deleted_ms is not None,
    )


@contextmanager
def opened_history(url: str, queue: str) -> Generator[HistorySide]:
    """Open the history at a URL.

    Raises:
        ConfigError: there is none, or its schema does not match this release.
        NotReady: the database does not answer.
    """
    try:
        with opened_database(url) as engine:
            with engine.connect() as connection:
                check_schema(connection)
            yield HistorySide(engine, queue)
    except HistoryMissing as error:
        raise ConfigError([f"{error}; or audit the queue alone, with --no-history"]) from error
    except HistoryError as error:
        raise ConfigError([str(error)]) from error
    except SQLAlchemyError as error:
        raise NotReady(f"the history's database failed: {why(error)}") from error
