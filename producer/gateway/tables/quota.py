"""The bound on what the files and responses of a tenant take, and what is answered beyond it."""

from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa

from sluice.producer.contract.bounds import TENANT_FILES_MIB
from sluice.producer.contract.tables import files, responses
from sluice.producer.gateway.errors import HttpError
from sluice.producer.gateway.refusals import refusal
from sluice.producer.gateway.tables.database import Database
from sluice.producer.gateway.tables.faults import TooManyBytes
from sluice.producer.gateway.tables.threads import SQL

Row = TypeVar("Row")
Result = TypeVar("Result")

MIN_FILE_BYTES = 4096
"""What a small file counts, for its row and its place on a disk."""

RESPONSE_BYTES = 1024
"""What a response counts besides its input, options and output, for its row and its entries in indexes."""


class Quota:
    """The bound for each tenant.

    Args:
        database: Has the files and responses of all gateways.
        max_bytes: The bound.
    """

    def __init__(self, database: Database, max_bytes: int) -> None:
        self._database, self._max_bytes = database, max_bytes

    async def check(self, tenant: str, num_bytes: int = 1) -> None:
        """Check before an upload or a batch that there is room, so that what must be refused is not received.

        Raises:
            HttpError: there is none.
        """
        try:
            await SQL.run(self._check, tenant, num_bytes)
        except TooManyBytes as error:
            raise self._refusal() from error

    async def add(self, add: Callable[[Row, int], Result], row: Row) -> Result:
        """Call a method of a store that adds a row if there is room within a number of bytes.

        Raises:
            HttpError: there is none.
        """
        try:
            return await SQL.run(add, row, self._max_bytes)
        except TooManyBytes as error:
            raise self._refusal() from error

    def _check(self, tenant: str, num_bytes: int) -> None:
        with self._database.reading() as connection:
            check_room(connection, tenant, num_bytes, self._max_bytes)

    def _refusal(self) -> HttpError:
        mib = self._max_bytes // 2**20
        message = f"the files and stored responses of the tenant may take {mib} MiB: delete some of them first"
        return refusal(TENANT_FILES_MIB, message)


def check_room(connection: sa.Connection, tenant: str, num_bytes: int, max_bytes: int) -> None:
    """Check that a tenant may store so many bytes more.

    Raises:
        TooManyBytes: its files and responses would take more than `max_bytes`.
    """
    if stored_bytes(connection, tenant) + num_bytes > max_bytes:
        raise TooManyBytes(tenant)


def stored_bytes(connection: sa.Connection, tenant: str) -> int:
    """Return what the files and responses of a tenant take. Of responses it reads an index only."""
    sizes = sa.case((files.c.bytes < MIN_FILE_BYTES, MIN_FILE_BYTES), else_=files.c.bytes)
    of_files = sa.select(sa.func.sum(sizes)).where(files.c.tenant == tenant)
    of_responses = sa.select(sa.func.sum(responses.c.bytes)).where(responses.c.tenant == tenant)
    sums = connection.execute(sa.select(of_files.scalar_subquery(), of_responses.scalar_subquery())).one()
    return sum(int(found or 0) for found in sums)
