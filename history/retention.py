"""Delete rows that the history has kept long enough, a slice at a time so that writers wait briefly. Knows no Redis."""

import time
from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.history.tables import HOUR_MS, attempts, audit_log, batches, jobs, of_submissions, results

SLICE_JOBS = 500
PAUSE_S = 0.02
"""Pause between slices. SQLite has one writer at a time, and the recorder is more urgent."""


def forget_before(engine: Engine, queue: str, before_ms: int, *, pause: Callable[[float], None] = time.sleep) -> int:
    """Delete jobs of a queue that ended before `before_ms` (rounded down to the hour), with attempts and results.

    Jobs that have not ended are kept at any age. A batch is deleted with the last of its jobs. Rows of the audit log
    are deleted at the same age, those of no queue too.

    Returns:
        The number of deleted jobs.
    """
    num_deleted = 0
    while num_in_slice := _delete_slice(engine, queue, before_ms - before_ms % HOUR_MS):
        num_deleted += num_in_slice
        pause(PAUSE_S)
    _forget_empty_batches(engine, queue, before_ms)
    while _forget_audit_slice(engine, queue, before_ms):
        pause(PAUSE_S)
    return num_deleted


def erase_prompts_before(
    engine: Engine, queue: str, before_ms: int, *, pause: Callable[[float], None] = time.sleep
) -> int:
    """Erase prompts of a queue's jobs that ended before `before_ms`, not their hashes. Return the number of jobs."""
    is_old = sa.and_(_ended_before(queue, before_ms - before_ms % HOUR_MS), jobs.c.prompt.is_not(None))
    num_erased = 0
    while True:
        with engine.begin() as connection:
            job_slice = sa.select(jobs.c.id, jobs.c.submitted_ms).where(is_old).limit(SLICE_JOBS)
            changed = connection.execute(
                jobs.update()
                .where(sa.tuple_(jobs.c.id, jobs.c.submitted_ms).in_(job_slice))
                .values(prompt=None, asked=None)
            ).rowcount
        num_erased += changed
        if changed < SLICE_JOBS:
            return num_erased
        pause(PAUSE_S)


def _ended_before(queue: str, hour_ms: int) -> sa.ColumnElement[bool]:
    return sa.and_(jobs.c.queue == queue, jobs.c.finished_hour_ms < hour_ms)


def _delete_slice(engine: Engine, queue: str, hour_ms: int) -> int:
    with engine.begin() as connection:
        old = sa.select(jobs.c.id, jobs.c.submitted_ms).where(_ended_before(queue, hour_ms)).limit(SLICE_JOBS)
        submissions = [(job_id, submitted_ms) for job_id, submitted_ms in connection.execute(old)]
        # Jobs first, as in the recorder: the same lock order prevents deadlocks.
        for table in (jobs, attempts, results):
            if submissions:
                connection.execute(table.delete().where(of_submissions(table, submissions)))
    return len(submissions)


def _forget_empty_batches(engine: Engine, queue: str, before_ms: int) -> None:
    of_batch = sa.and_(jobs.c.queue == batches.c.queue, jobs.c.batch == batches.c.id)
    is_old = sa.and_(batches.c.queue == queue, batches.c.created_ms < before_ms)
    with engine.begin() as connection:
        connection.execute(batches.delete().where(is_old, ~sa.exists().where(of_batch)))


def _forget_audit_slice(engine: Engine, queue: str, before_ms: int) -> int:
    is_ours = sa.or_(audit_log.c.queue == queue, audit_log.c.queue.is_(None))
    with engine.begin() as connection:
        old = sa.select(audit_log.c.id).where(audit_log.c.at_ms < before_ms, is_ours).limit(SLICE_JOBS)
        return connection.execute(audit_log.delete().where(audit_log.c.id.in_(old))).rowcount
