"""The storage quota of a tenant's files and responses, and the error for requests that exceed it."""

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import sqlalchemy as sa

from sluice.gateway.errors import HttpError
from sluice.gateway.faults import TooManyBytes
from sluice.gateway.refusals import refusal
from sluice.gateway.tables.database import Database
from sluice.gateway.threads import SQL
from sluice.history.tables import files, responses
from sluice.protocol.bounds import TENANT_FILES_MIB

Row = TypeVar("Row")
Result = TypeVar("Result")

MIN_FILE_BYTES = 4096
"""Least number of bytes that a file counts, for its row and its space on a disk."""

RESPONSE_BYTES = 1024
"""Bytes that a response counts besides its input, options and output, for its row and its index entries."""


class Quota:
    """The storage quota of each tenant.

    Args:
        database: The database with the files and responses of all gateways.
        max_bytes: The quota of a tenant.
    """

    def __init__(self, database: Database, max_bytes: int) -> None:
        self._database, self._max_bytes = database, max_bytes
        self._incoming: dict[str, int] = {}
        """Bytes of uploads that this process is receiving and that have no row yet, by tenant."""

    async def check(self, tenant: str, num_bytes: int = 1) -> None:
        """Check that there is room before a batch.

        Raises:
            HttpError: there is no room.
        """
        if await self._stored(tenant) + num_bytes > self._max_bytes:
            raise self._refusal()

    @contextmanager
    def receiving(self, tenant: str) -> Generator["Incoming"]:
        """Count an upload of a tenant until its row exists or it has failed."""
        incoming = Incoming(partial(self._reserve, tenant))
        try:
            yield incoming
        finally:
            self._count(tenant, -incoming.num_counted)

    async def _reserve(self, tenant: str, num_bytes: int) -> None:
        stored = await self._stored(tenant)
        # No await from here on, so that exactly those concurrent uploads are counted that fit.
        if stored + self._incoming.get(tenant, 0) + num_bytes > self._max_bytes:
            raise self._refusal()
        self._count(tenant, num_bytes)

    def _count(self, tenant: str, num_bytes: int) -> None:
        left = self._incoming.pop(tenant, 0) + num_bytes
        if left:
            self._incoming[tenant] = left

    async def add(self, add: Callable[[Row, int], Result], row: Row) -> Result:
        """Add a row by a store's method, which checks that there is room within a number of bytes.

        Raises:
            HttpError: there is no room.
        """
        try:
            return await SQL.run(add, row, self._max_bytes)
        except TooManyBytes as error:
            raise self._refusal() from error

    async def _stored(self, tenant: str) -> int:
        return await SQL.run(self._read_stored, tenant)

    def _read_stored(self, tenant: str) -> int:
        with self._database.reading() as connection:
            return stored_bytes(connection, tenant)

    def _refusal(self) -> HttpError:
        mib = self._max_bytes // 2**20
        message = f"the files and stored responses of the tenant may take {mib} MiB: delete some first"
        return refusal(TENANT_FILES_MIB, message)


class Incoming:
    """The part of the quota that one upload uses while it is received. Changes as it arrives.

    Args:
        reserve: Counts bytes, or raises HttpError.
    """

    def __init__(self, reserve: Callable[[int], Awaitable[None]]) -> None:
        self._reserve = reserve
        self._num_received = 0
        self.num_counted = 0
        """Announced or received bytes, whichever is more."""

    async def announce(self, num_bytes: int) -> None:
        """Count the announced size, so that an upload that must be refused is not received.

        Raises:
            HttpError: there is no room.
        """
        await self._count_up_to(max(num_bytes, MIN_FILE_BYTES))

    async def receive(self, num_bytes: int) -> None:
        """Count received bytes before they are stored.

        Raises:
            HttpError: there is no room.
        """
        self._num_received += num_bytes
        await self._count_up_to(self._num_received)

    async def _count_up_to(self, num_bytes: int) -> None:
        if num_bytes > self.num_counted:
            await self._reserve(num_bytes - self.num_counted)
            self.num_counted = num_bytes


def check_room(connection: sa.Connection, tenant: str, num_bytes: int, max_bytes: int) -> None:
    """Check that a tenant may store this many more bytes.

    Raises:
        TooManyBytes: its files and responses would take more than `max_bytes`.
    """
    if stored_bytes(connection, tenant) + num_bytes > max_bytes:
        raise TooManyBytes(tenant)


def stored_bytes(connection: sa.Connection, tenant: str) -> int:
    """Return the bytes that count for a tenant's files and responses. For responses, only an index is read."""
    sizes = sa.case((files.c.bytes < MIN_FILE_BYTES, MIN_FILE_BYTES), else_=files.c.bytes)
    of_files = sa.select(sa.func.sum(sizes)).where(files.c.tenant == tenant)
    of_responses = sa.select(sa.func.sum(responses.c.bytes)).where(responses.c.tenant == tenant)
    sums = connection.execute(sa.select(of_files.scalar_subquery(), of_responses.scalar_subquery())).one()
    return sum(int(num_bytes or 0) for num_bytes in sums)
