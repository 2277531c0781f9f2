"""The audit log: what it says of changes that fail."""

import asyncio
from random import Random
from secrets import token_hex

import pytest
import sqlalchemy as sa

from sluice.gateway.access import Caller
from sluice.gateway.audit import MAX_REFUSALS, AuditLog
from sluice.gateway.errors import HttpError, bad_request
from sluice.gateway.tables.database import Database
from sluice.history.tables import audit_log
from sluice.producer.errors import QueueUnreachable

CUT_OFF = """
CREATE TRIGGER cut_off BEFORE UPDATE ON audit_log BEGIN SELECT RAISE(FAIL, 'the disk is full'); END
"""


def outcomes(database: Database) -> list[str | None]:
    """The outcomes in the log."""
    with database.reading() as connection:
        return list(connection.execute(sa.select(audit_log.c.outcome)).scalars())


class TestGivenAChangeThatFails:
    @pytest.mark.parametrize(
        ("error", "outcome"),
        [
            (bad_request("no", code="state"), "state"),
            (HttpError(409, "", "no"), "refused"),
            (QueueUnreachable("away"), "QueueUnreachable"),
            (KeyError("a fault of ours"), "KeyError"),
            (asyncio.CancelledError(), "CancelledError"),
        ],
        ids=lambda value: type(value).__name__,
    )
    async def test_when_it_ends_then_its_row_does_not_say_done(
        self, sqlite_url: str, error: BaseException, outcome: str
    ) -> None:
        with Database(sqlite_url) as database:
            with pytest.raises(type(error)):
                async with AuditLog(database).action(Caller(), "cancel", "0.acme.1"):
                    raise error

            assert outcomes(database) == [outcome]


class TestGivenAChangeOfManyJobs:
    async def test_when_it_ends_then_each_job_has_a_row_with_its_outcome(self, history_url: str) -> None:
        jobs = [f"0.acme.{token_hex(16)}" for _ in range(1200)]
        with Database(history_url) as database:
            async with AuditLog(database).action(Caller(), "delete", jobs, "q") as entry:
                entry.outcomes[jobs[7]] = "refused"

            query = sa.select(audit_log.c.target, audit_log.c.outcome).where(audit_log.c.target.in_(jobs))
            with database.reading() as connection:
                found = {str(target): str(outcome) for target, outcome in connection.execute(query)}

        assert found == {job_id: "refused" if job_id == jobs[7] else "done" for job_id in jobs}

    async def test_when_a_target_is_longer_than_an_index_takes_then_it_is_cut(self, history_url: str) -> None:
        name = "".join(chr(0x4E00 + draw) for draw in Random(3).choices(range(20_000), k=5000))
        with Database(history_url) as database:
            async with AuditLog(database).action(Caller(), "submit", f"{name}\0"):
                pass

            found = rows_of(database, "submit")

        assert name[:333] in found


class TestGivenAnOutcomeThatCannotBeWritten:
    async def test_when_a_change_was_made_then_it_is_answered_and_logged(
        self, sqlite_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Database(sqlite_url) as database:
            with database.transaction() as connection:
                connection.execute(sa.text(CUT_OFF))

            async with AuditLog(database).action(Caller(), "submit", "small") as entry:
                entry.outcome = "0.acme.1"

            assert outcomes(database) == [None]
        assert "0.acme.1" in caplog.text


class TestGivenSignInsThatFail:
    async def test_when_there_are_many_then_the_first_of_a_minute_are_written(self, sqlite_url: str) -> None:
        with Database(sqlite_url) as database:
            audit = AuditLog(database)
            for _ in range(3 * MAX_REFUSALS):
                await audit.refused_sign_in("192.0.2.1", None)

            assert rows_of(database, "sign_in") == ["192.0.2.1"] * MAX_REFUSALS
            assert "refused; more in this minute are not listed" in outcomes(database)


def rows_of(database: Database, action: str) -> list[str]:
    """The targets of an action."""
    with database.reading() as connection:
        return list(connection.execute(sa.select(audit_log.c.target).where(audit_log.c.action == action)).scalars())
