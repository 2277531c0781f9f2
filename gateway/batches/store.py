"""The table of batches.

One task at a time works on a batch: `take` leases the batch to the task with a higher epoch, and each of the task's
writes is fenced by that epoch. So a task that was considered dead cannot write any more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, cast

import sqlalchemy as sa

from sluice.gateway.batches.batch import CANCELLING, IN_PROGRESS, OPEN, VALIDATING, StoredBatch, batch_of
from sluice.gateway.files.store import INPUT, OUTPUT, File, insert_file
from sluice.gateway.tables.database import Database, lock_tenant
from sluice.gateway.tables.pages import PageRequest, is_id, page
from sluice.history.tables import files, gateway_batches
from sluice.protocol.clock import wall_ms

TAKEN_MS = 6000
"""Duration of the lease on a batch. After a kill, another task continues after this time."""

MAX_DUE = 200
T = gateway_batches.c


class Due(NamedTuple):
    """A batch that must be continued."""

    id: str
    epoch: int
    tenant: str


class TooManyBatches(Exception):
    """The tenant has the most open batches that it may have."""


class BatchLost(Exception):
    """Another task has the batch now, or its status has changed, so this task's copy is outdated."""


class BatchStore:
    """The batches in a database. Every method raises HistoryUnavailable while the database cannot be used."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # ------------------------------------------------------------ clients

    def add(self, batch: StoredBatch, *, max_open: int | None = None) -> bool:
        """Add a batch; return False if its tenant has no such input file.

        Raises:
            TooManyBatches: the tenant has `max_open` open batches.
        """
        is_input = (files.c.id == batch.input_file, files.c.tenant == batch.tenant, files.c.purpose == INPUT)
        with self._database.transaction() as connection:
            # Locked, so that the file is not deleted in between.
            if connection.execute(sa.select(files.c.id).where(*is_input).with_for_update()).first() is None:
                return False
            if max_open is not None:
                _check_open(connection, batch.tenant, max_open)
            connection.execute(gateway_batches.insert().values(**_row(batch)))
        return True

    def get(self, batch_id: str, tenant: str) -> StoredBatch | None:
        """Return a tenant's batch; None if it does not exist."""
        return None if not is_id(batch_id) else self._one(T.id == batch_id, T.tenant == tenant)

    def page(self, request: PageRequest) -> tuple[list[StoredBatch], bool]:
        """Return a page of batches, and whether there are more."""
        with self._database.reading() as connection:
            rows, has_more = page(connection, gateway_batches, request)
        return [batch_of(row) for row in rows], has_more

    def cancel(self, batch_id: str, tenant: str) -> StoredBatch | None:
        """Begin to cancel a batch that is validating or in progress; return the batch, or None if it does not exist."""
        if not is_id(batch_id):
            return None
        is_it = (T.id == batch_id, T.tenant == tenant)
        with self._database.transaction() as connection:
            row = connection.execute(_all().where(*is_it).with_for_update()).mappings().one_or_none()
            if row is None:
                return None
            batch = batch_of(row)
            if batch.status not in (VALIDATING, IN_PROGRESS):
                return batch
            batch = replace(batch, status=CANCELLING, times={**batch.times, CANCELLING: wall_ms()})
            connection.execute(gateway_batches.update().where(*is_it).values(status=batch.status, times=batch.times))
        return batch

    # ------------------------------------------------------------ tasks

    def due(self, queue: str) -> list[Due]:
        """Return the due batches of a queue that no task has: the first of each tenant, in order."""
        place = sa.func.row_number().over(partition_by=T.tenant, order_by=(T.due_ms, T.id)).label("place")
        is_due = (T.status.in_(OPEN), T.queue == queue, T.due_ms <= wall_ms())
        first = sa.select(T.id, T.epoch, T.tenant, T.due_ms, place).where(*is_due).subquery()
        query = sa.select(first.c.id, first.c.epoch, first.c.tenant).where(first.c.place == 1)
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(first.c.due_ms).limit(MAX_DUE)).all()
        return [Due(*row) for row in rows]

    def take(self, batch_id: str, epoch: int) -> StoredBatch | None:
        """Lease a batch if no other task has taken it since this epoch; return it, or None."""
        is_it = (T.id == batch_id, T.epoch == epoch, T.status.in_(OPEN), T.due_ms <= wall_ms())
        lease = gateway_batches.update().where(*is_it).values(epoch=epoch + 1, due_ms=wall_ms() + TAKEN_MS)
        with self._database.transaction() as connection:
            if not _has_changed(connection, lease):
                return None
        return self._one(T.id == batch_id, T.epoch == epoch + 1)

    def renew(self, batch: StoredBatch) -> str | None:
        """Renew the lease and return the status of the batch; None if another task has it."""
        mine = (T.id == batch.id, T.epoch == batch.epoch)
        renewed = gateway_batches.update().where(*mine).values(due_ms=wall_ms() + TAKEN_MS)
        with self._database.transaction() as connection:
            return connection.execute(renewed.returning(T.status)).scalar()

    def release(self, batch: StoredBatch, pause_ms: int) -> bool:
        """End the lease; the batch is due again after a pause. Return whether the lease was still valid."""
        mine = (T.id == batch.id, T.epoch == batch.epoch)
        with self._database.transaction() as connection:
            return _has_changed(connection, gateway_batches.update().where(*mine).values(due_ms=wall_ms() + pause_ms))

    def change(self, batch: StoredBatch, *, new_files: Sequence[File] = (), **values: object) -> StoredBatch:
        """Change fields of a batch and add files, in one transaction; return the changed batch.

        Raises:
            BatchLost: another task has the batch, or its status has changed.
        """
        mine = (T.id == batch.id, T.epoch == batch.epoch, T.status == batch.status)
        # Any: each is as its column says
        changed = replace(batch, **cast("dict[str, Any]", values))
        row = _row(changed)
        with self._database.transaction() as connection:
            update = gateway_batches.update().where(*mine).values(**{name: row[name] for name in values})
            if not _has_changed(connection, update):
                raise BatchLost(batch.id)
            for file in new_files:
                insert_file(connection, file)
        return changed

    def move(self, batch: StoredBatch, status: str, *, new_files: Sequence[File] = (), **values: object) -> StoredBatch:
        """Change the status of a batch, with other fields, as `change` does.

        Raises:
            BatchLost: another task has the batch, or its status has changed.
        """
        times = {**batch.times, status: wall_ms()}
        return self.change(batch, new_files=new_files, status=status, times=times, **values)

    def named_objects(self) -> set[str]:
        """Return the keys of all objects that rows refer to: those of unfinished batches and of batches' files."""
        own = sa.select(T.names, T.parts).where(T.status.in_(OPEN))
        theirs = sa.select(files.c.objects).where(files.c.purpose == OUTPUT)
        keys = set[str]()
        with self._database.reading() as connection:
            # Batches before files: if a batch finishes in between, its objects are those of its files.
            for names, parts in connection.execute(own):
                keys |= {names} | {key for objects in parts.values() for key, *_ in objects}
            for objects in connection.execute(theirs).scalars():
                keys |= {key for key, *_ in objects}
        return keys

    def _one(self, *conditions: sa.ColumnElement[bool]) -> StoredBatch | None:
        with self._database.reading() as connection:
            row = connection.execute(_all().where(*conditions)).mappings().one_or_none()
        return None if row is None else batch_of(row)


def _all() -> sa.Select[*tuple[Any, ...]]:  # Any: columns of several types
    return sa.select(*gateway_batches.columns)


def _check_open(connection: sa.Connection, tenant: str, max_open: int) -> None:
    lock_tenant(connection, tenant)
    is_open = (T.tenant == tenant, T.status.in_(OPEN))
    num_open = connection.execute(sa.select(sa.func.count()).select_from(gateway_batches).where(*is_open)).scalar_one()
    if num_open >= max_open:
        raise TooManyBatches(f"the tenant has {num_open} unfinished batches: wait for one, or cancel it")


def _has_changed(connection: sa.Connection, update: sa.Update) -> bool:
    return connection.execute(update.returning(T.id)).first() is not None


def _row(batch: StoredBatch) -> Mapping[str, Any]:  # Any: as the columns say
    return asdict(batch) | {"parts": batch.parts.as_json()}
