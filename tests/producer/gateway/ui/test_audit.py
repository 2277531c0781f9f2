"""The audit log: what it says of changes that fail."""

import asyncio

import pytest
import sqlalchemy as sa

from sluice.producer.contract.tables import audit_log
from sluice.producer.errors import QueueUnreachable
from sluice.producer.gateway.access import Caller
from sluice.producer.gateway.errors import HttpError, bad_request
from sluice.producer.gateway.tables.database import Database
from sluice.producer.gateway.ui.audit import AuditLog


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
