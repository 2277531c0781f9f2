"""Delete what the history has kept long enough. Knows no Redis; in bites, so that nobody waits for it."""

import time
from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from producer.contract.tables import HOUR_MS, attempts, batches, jobs, results

BITE_JOBS = 500
PAUSE_S = 0.02
"""Between bites: SQLite has one writer at a time, and the recorder is more urgent."""


def forget_before(engine: Engine, before_ms: int, *, pause: Callable[[float], None] = time.sleep) -> int:
    """Delete jobs that ended before `before_ms` (rounded down to the hour), with all that hangs on them.

    A job that has not ended is never deleted, however old. Batches go with the last of their jobs.

    Returns:
        How many jobs were deleted.
    """
    num_deleted = 0
    while num_bite := _bite(engine, before_ms - before_ms % HOUR_MS):
        num_deleted += num_bite
        pause(PAUSE_S)
    _forget_empty_batches(engine, before_ms)
    return num_deleted


def erase_prompts_before(engine: Engine, before_ms: int) -> int:
    """Erase the text of prompts of jobs that ended before `before_ms`; their hashes and the rest stay."""
    is_old = sa.and_(jobs.c.finished_hour_ms < before_ms - before_ms % HOUR_MS, jobs.c.prompt.is_not(None))
    num_erased = 0
    while True:
        with engine.begin() as connection:
            bite = sa.select(jobs.c.id).where(is_old).limit(BITE_JOBS)
            changed = connection.execute(
                jobs.update().where(jobs.c.id.in_(bite)).values(prompt=None, asked=None)
            ).rowcount
        num_erased += changed
        if changed < BITE_JOBS:
            return num_erased


def _bite(engine: Engine, before_ms: int) -> int:
    with engine.begin() as connection:
        old = sa.select(jobs.c.id).where(jobs.c.finished_hour_ms < before_ms).limit(BITE_JOBS)
        ids = connection.execute(old).scalars().all()
        # Jobs first, as the recorder does: two that lock in one order cannot wait for each other.
        for table, column in ((jobs, jobs.c.id), (attempts, attempts.c.job_id), (results, results.c.job_id)):
            if ids:
                connection.execute(table.delete().where(column.in_(ids)))
    return len(ids)


def _forget_empty_batches(engine: Engine, before_ms: int) -> None:
    of_batch = sa.and_(jobs.c.queue == batches.c.queue, jobs.c.batch == batches.c.id)
    is_empty = ~sa.exists().where(of_batch)
    with engine.begin() as connection:
        connection.execute(batches.delete().where(batches.c.created_ms < before_ms, is_empty))
