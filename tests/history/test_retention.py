"""What is old enough goes, and nothing else."""

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.history.retention import SLICE_JOBS, erase_prompts_before, forget_before
from sluice.history.tables import HOUR_MS, attempts, audit_log, batches, jobs, results
from tests.history import events as e
from tests.history.test_rows import write

DAY_MS = 24 * HOUR_MS
NOW = e.NOON_MS + 10 * DAY_MS


def no_pause(_: float) -> None:
    """Continue at once."""


def ran(job_id: str, at_ms: int, **fields: object) -> list[e.Packed]:
    """A job that was submitted and done at about one time."""
    return [
        e.submitted(job_id, at_ms, prompt=e.prompt("secret"), **fields),  # pyright: ignore[reportArgumentType]  # fields by name
        e.started(job_id, at_ms, submitted_ms=at_ms),
        e.ended(job_id, at_ms + 1000, submitted_ms=at_ms, result=e.result("text")),
    ]


def ids_in(history: Engine, column: sa.Column[str]) -> list[str]:
    """All values of a column, in order."""
    with history.connect() as connection:
        return list(connection.execute(sa.select(column).order_by(column)).scalars())


class TestGivenOldAndNewJobs:
    """Some ended ten days ago, one just now, one never."""

    def test_when_forgotten_then_old_ended_jobs_go_with_all_that_hangs_on_them(self, history: Engine) -> None:
        write(
            history,
            [
                *ran("0.a.old", e.NOON_MS, batch=b"old"),
                *ran("0.a.new", NOW, batch=b"new"),
                e.submitted("0.a.waiting", e.NOON_MS, batch=b"waiting"),
            ],
        )

        deleted = forget_before(history, e.QUEUE, NOW - 5 * DAY_MS, pause=no_pause)

        assert deleted == 1
        assert ids_in(history, jobs.c.id) == ["0.a.new", "0.a.waiting"]
        assert ids_in(history, attempts.c.job_id) == ids_in(history, results.c.job_id) == ["0.a.new"]
        assert ids_in(history, batches.c.id) == ["new", "waiting"]

    def test_when_forgotten_then_old_rows_of_the_audit_log_go(self, history: Engine) -> None:
        ages = {f"old{number}": NOW - 6 * DAY_MS for number in range(SLICE_JOBS + 5)} | {"new": NOW - 4 * DAY_MS}
        with history.begin() as connection:
            given = [{"id": name, "at_ms": at_ms, "action": "cancel", "target": name} for name, at_ms in ages.items()]
            connection.execute(audit_log.insert(), given)

        forget_before(history, e.QUEUE, NOW - 5 * DAY_MS, pause=no_pause)

        assert ids_in(history, audit_log.c.id) == ["new"]

    def test_when_there_are_more_than_a_bite_then_all_go(self, sqlite_history: Engine) -> None:
        write(sqlite_history, [event for n in range(SLICE_JOBS + 5) for event in ran(f"0.a.{n}", e.NOON_MS)])

        assert forget_before(sqlite_history, e.QUEUE, NOW, pause=no_pause) == SLICE_JOBS + 5

    def test_when_prompts_are_erased_then_their_hashes_stay(self, history: Engine) -> None:
        write(history, [*ran("0.a.old", e.NOON_MS), *ran("0.a.new", NOW)])

        assert erase_prompts_before(history, e.QUEUE, NOW - 5 * DAY_MS) == 1

        with history.connect() as connection:
            found = connection.execute(sa.select(jobs.c.prompt, jobs.c.prompt_sha256).order_by(jobs.c.id)).all()
        assert [one.prompt for one in found] == ["secret", None]
        assert all(one.prompt_sha256 for one in found)
