"""Query the job history on SQLite and PostgreSQL. Only `forget` writes.

The history follows the queue: events that are still in the outbox are not in the tables yet.
"""

from array import array
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from sluice.history.database import HistoryError, check_schema, nothing_at, open_database
from sluice.history.filters import AnyQuery, JobFilter, QueueNames, is_in
from sluice.history.percentiles import percentile
from sluice.history.tables import AnyColumn, attempts, jobs, of_submissions, queue_of_id, results
from sluice.history.views import METRICS, PERCENTILES, batch_progress, timeline
from sluice.protocol.clock import wall_ms
from sluice.protocol.errors import HistoryUnavailable
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId

FORGET_SLICE = 500
ROWS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job in the history. A field is None while unknown. `history.tables` describes the columns."""

    id: str
    queue: str
    tenant: str
    state: str
    reason: str | None
    error: str | None
    error_code: str | None
    model: str | None
    batch: str | None
    priority: int | None
    worker: str | None
    attempts: int | None
    preemptions: int | None
    resumed_tokens: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    submitted_ms: int | None
    pulled_ms: int | None
    scheduled_ms: int | None
    first_token_ms: int | None
    finished_ms: int | None
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    itl_max_s: float | None
    e2e_s: float | None
    sampling: Mapping[str, object] | None
    exactness: str | None
    seed: str | None
    options: Mapping[str, object] | None
    metadata: Mapping[str, object] | None
    custom_id: str | None
    line: int | None
    endpoint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """One event of a job."""

    at_ms: int
    event: str
    epoch: int | None
    detail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One claim of a job by a worker."""

    attempt: int | None
    incarnation: str | None
    started_ms: int | None
    ended_ms: int | None
    outcome: str | None
    why: str | None
    gap_s: float | None
    """Longest wait of a reader for tokens, from the last token of the attempt before."""

    seen_ms: int | None = None
    """The last heartbeat of its worker, if that died."""

    preempted_s: float | None = None
    """The waits of all its preemptions."""

    preemption_times: Sequence[Sequence[int | None]] | None = None
    """The first ones: milliseconds from its start, and milliseconds until it ran again; None if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyRow:
    """The distribution of one metric over the selected done jobs."""

    metric: str
    jobs: int
    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """A job whose data is to be deleted."""

    id: JobId
    queue: str
    state: JobState | None
    """Its state in the queue; None if only the history has the job."""

    submitted_ms: int | None = None
    """When the job in the queue was submitted."""


class History:
    """An open job history. Use it in a `with`.

    Args:
        url: `sqlite:///FILE` or `postgresql://…`.
        patience_s: As of `open_database`.

    Raises:
        HistoryUnavailable: the database cannot be reached or has no such tables; raised on entering or by a query.
    """

    def __init__(self, url: str, *, is_writer: bool = False, patience_s: float | None = None) -> None:
        with _explained():
            self._engine = open_database(url, is_writer=is_writer, patience_s=patience_s)
        path = self._engine.url.database
        # SQLite would create an empty file at a missing path.
        if self._engine.dialect.name == "sqlite" and not Path(str(path)).exists():
            raise HistoryUnavailable(nothing_at(path, "job history"))

    def __enter__(self) -> Self:
        with self._connection() as connection:
            check_schema(connection)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.dispose()

    def jobs(self, job_filter: JobFilter, *, limit: int = 100) -> list[JobRow]:
        """Return jobs, newest first."""
        return [JobRow(**row) for row in self._rows(job_filter.newest_first(_JOB_COLUMNS).limit(limit))]

    def job(self, queue: QueueNames, job_id: str) -> JobRow | None:
        """Return the newest submission of one job, or None."""
        rows = self._rows(sa.select(*_JOB_COLUMNS).where(_is_newest(jobs.c.id, jobs.c.submitted_ms, queue, job_id)))
        return JobRow(**rows[0]) if rows else None

    def num_submissions(self, queue: QueueNames, job_id: str) -> int:
        """Return how often this id was submitted: it may be used again after the queue has forgotten it."""
        [row] = self._rows(sa.select(sa.func.count().label("jobs")).where(*_is_job(queue, job_id)))
        return row["jobs"]

    def timeline(self, queue: QueueNames, job_id: str) -> list[TimelineRow]:
        """Return the events of the newest submission of one job, in order."""
        columns = [timeline.c[field.name] for field in fields(TimelineRow)]
        is_newest = _is_newest(timeline.c.job_id, timeline.c.submitted_ms, queue, job_id)
        query = sa.select(*columns).where(is_newest).order_by(timeline.c.at_ms, timeline.c.place)
        return [TimelineRow(**row) for row in self._rows(query)]

    def attempts(self, queue: QueueNames, job_id: str) -> list[AttemptRow]:
        """Return the claims of the newest submission of one job by workers, in order."""
        columns = [attempts.c[field.name] for field in fields(AttemptRow)]
        is_newest = _is_newest(attempts.c.job_id, attempts.c.submitted_ms, queue, job_id)
        query = sa.select(*columns).where(is_newest).order_by(attempts.c.epoch)
        return [AttemptRow(**row) for row in self._rows(query)]

    def result(self, queue: QueueNames, job_id: str) -> Mapping[str, object] | None:
        """Return `choices` and `usage` of a job's newest submission; None if the history does not keep its result."""
        is_newest = _is_newest(results.c.job_id, results.c.submitted_ms, queue, job_id)
        rows = self._rows(sa.select(results.c.choices, results.c.usage).where(is_newest))
        return rows[0] if rows else None

    def counts(self, job_filter: JobFilter) -> dict[str, int]:
        """Return the number of jobs by state."""
        counted = sa.select(jobs.c.state, sa.func.count().label("jobs"))
        query = counted.where(*job_filter.clauses()).group_by(jobs.c.state)
        return {row["state"]: row["jobs"] for row in self._rows(query)}

    def batch(self, queue: str, batch: str) -> Mapping[str, int | None] | None:
        """Return the progress of a batch, counted from its jobs."""
        is_batch = (batch_progress.c.queue == queue, batch_progress.c.id == batch)
        rows = self._rows(sa.select(batch_progress).where(*is_batch))
        return rows[0] if rows else None

    def latency(self, job_filter: JobFilter) -> list[LatencyRow]:
        """Return mean, percentiles (interpolated as numpy does) and maximum of each metric over the done jobs.

        Computed in Python (80 bytes a job): sorting 150,000 values is six times faster than in SQLite.
        """
        query = sa.select(*(jobs.c[metric] for metric in METRICS)).where(jobs.c.state == "done", *job_filter.clauses())
        samples = [array("d") for _ in METRICS]
        with self._connection() as connection:
            for row in connection.execution_options(yield_per=ROWS_AT_ONCE).execute(query):
                for value, sample in zip(row, samples, strict=True):
                    if value is not None:
                        sample.append(value)
        return [_latency(metric, sample) for metric, sample in zip(METRICS, samples, strict=True) if sample]

    def forget(self, jobs_to_forget: Sequence[Forgotten]) -> set[JobId]:
        """Delete the data of these jobs; returns those that had a row.

        The rows of all their submissions keep id, queue, tenant, state and times, so that totals stay correct, and
        accept no further events. A submission without a row gets an empty one, so that events still in the outbox are
        rejected.
        """
        with_rows: set[JobId] = set()
        for at in range(0, len(jobs_to_forget), FORGET_SLICE):
            part = jobs_to_forget[at : at + FORGET_SLICE]
            with self._connection() as connection:
                rows = connection.execute(_forgotten(part).returning(jobs.c.id, jobs.c.submitted_ms))
                have = {(str(job_id), int(submitted_ms)) for job_id, submitted_ms in rows}
                connection.execute(results.delete().where(of_submissions(results, list(have))))
                if tombstones := [row for job in part if (row := _tombstone(job, have)) is not None]:
                    connection.execute(jobs.insert(), tombstones)
            with_rows |= {JobId(job_id) for job_id, _ in have}
        return with_rows

    def _rows(self, query: AnyQuery) -> list[dict[str, Any]]:  # Any: a row's values are as its columns say
        with self._connection() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    @contextmanager
    def _connection(self) -> Generator[sa.Connection]:
        with _explained(), self._engine.begin() as connection:
            yield connection


@contextmanager
def _explained() -> Generator[None]:
    try:
        yield
    except HistoryError as error:
        raise HistoryUnavailable(f"{error}. Give --database-url or SLUICE_DATABASE_URL.") from error
    except SQLAlchemyError as error:
        # Only the driver's message: SQLAlchemy's adds the statement and its values.
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise HistoryUnavailable(f"the history cannot be read: {cause}. Check the database URL.") from error


def _is_job(queue: QueueNames, job_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return jobs.c.id == job_id, is_in(queue_of_id, queue)


def _is_newest(id_column: AnyColumn, time_column: AnyColumn, queue: QueueNames, job_id: str) -> sa.ColumnElement[bool]:
    newest = sa.select(sa.func.max(jobs.c.submitted_ms)).where(*_is_job(queue, job_id)).scalar_subquery()
    return sa.and_(id_column == job_id, time_column == newest)


_JOB_COLUMNS = [jobs.c[field.name] for field in fields(JobRow)]


def _tombstone(job: Forgotten, have: Set[tuple[str, int]]) -> dict[str, object] | None:
    """Return an empty row for the submission in the queue; None if it has a row or the queue does not know the job."""
    if job.state is None or job.submitted_ms is None or (job.id, job.submitted_ms) in have:
        return None
    partition, tenant, _ = split_job_id(job.id)
    own = {"id": job.id, "submitted_ms": job.submitted_ms, "queue": job.queue, "partition": partition}
    return {**own, "tenant": tenant, "version": 0, "state": job.state, "deleted_ms": wall_ms()}


def _forgotten(forgotten: Sequence[Forgotten]) -> sa.Update:
    erased = ("error", "seed", "traceparent", "options", "metadata", "prompt_sha256", "prompt", "asked", "custom_id",
              "record_error")  # fmt: skip
    nothing = dict.fromkeys(erased, sa.null())
    # The ids as well, for their index.
    names = [(job.queue, job.id) for job in forgotten]
    is_one = (jobs.c.id.in_([job_id for _, job_id in names]), sa.tuple_(jobs.c.queue, jobs.c.id).in_(names))
    return jobs.update().where(*is_one).values(**nothing, deleted_ms=wall_ms())


def _latency(metric: str, values: Iterable[float]) -> LatencyRow:
    ordered = sorted(values)
    percentiles = {f"p{percent}_s": percentile(ordered, percent) for percent in PERCENTILES}
    return LatencyRow(
        metric=metric, jobs=len(ordered), mean_s=sum(ordered) / len(ordered), max_s=ordered[-1], **percentiles
    )


def newest_jobs(url: str, *, queue: str, batch: str | None, state: str | None, limit: int) -> list[JobRow]:
    """Return the newest jobs of a queue.

    Raises:
        HistoryUnavailable: the history cannot be read.
    """
    with History(url) as history:
        return history.jobs(JobFilter(queue=queue, batch=batch, state=state), limit=limit)
