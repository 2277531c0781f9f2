"""The times of a job, from the queue and the history. No I/O."""

from collections.abc import Iterator, Sequence

from sluice.history.queries import AttemptRow, JobRow
from sluice.producer.operations.views import JobStatus
from sluice.producer.timeline.picture import Attempt, Times


def times_of(now: JobStatus | None, row: JobRow | None, attempts: Sequence[AttemptRow]) -> Times | None:
    """Return the times of a job: those in the history, and from the queue those that it lacks yet.

    Args:
        now: The job's status in the queue; None if the queue has forgotten the job.
        row: The job's row in the history, if there is one.
        attempts: The job's attempts in the history.
    """
    submitted_ms = now.submitted_ms if now is not None else row.submitted_ms if row is not None else None
    if submitted_ms is None or (row is not None and now is not None and row.submitted_ms != submitted_ms):
        row, attempts = (None, ()) if now is not None else (row, attempts)
    if submitted_ms is None:
        return None
    return Times(
        state=now.state if now is not None else row.state if row is not None else "unknown",
        submitted_ms=submitted_ms,
        scheduled_ms=_first(now and now.first_scheduled_ms, row and row.scheduled_ms),
        first_token_ms=_first(now and now.first_token_ms, row and row.first_token_ms),
        ended_ms=_first(now and now.ended_ms, row and row.finished_ms if now is None else None),
        attempts=tuple(_attempts(attempts, now)),
        preemptions=(row.preemptions or 0) if row is not None else 0,
    )


def _attempts(rows: Sequence[AttemptRow], now: JobStatus | None) -> Iterator[Attempt]:
    number = 0
    for number, row in enumerate((row for row in rows if row.started_ms is not None), start=1):
        yield Attempt(
            number=row.attempt or number,
            start_ms=row.started_ms or 0,
            end_ms=row.ended_ms,
            outcome=row.outcome,
            why=row.why,
            seen_ms=row.seen_ms,
            preemptions=tuple(_preemptions(row)),
        )
    if now is not None and now.started_ms is not None and now.attempt > number:
        yield Attempt(number=now.attempt, start_ms=now.started_ms, end_ms=now.ended_ms, outcome=None, why=None)


def _preemptions(row: AttemptRow) -> Iterator[tuple[int, int | None]]:
    for at_ms, wait_ms in row.preemption_times or ():
        if at_ms is not None:
            begin_ms = (row.started_ms or 0) + at_ms
            yield begin_ms, None if wait_ms is None else begin_ms + wait_ms


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
