"""The table of files."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from sluice.gateway.faults import FileOfOpenBatch
from sluice.gateway.tables.database import Database, lock_tenant
from sluice.gateway.tables.pages import PageRequest, is_id, new_name, page
from sluice.gateway.tables.quota import MIN_FILE_BYTES, check_room
from sluice.history.tables import files, gateway_batches
from sluice.protocol.openai_format.bodies import Object

INPUT, OUTPUT = "batch", "batch_output"
PREFIX = "file-"
UPLOADS = "files"
"""Folder of uploaded objects; each has the name of its file."""

OVER = ("completed", "failed", "expired", "cancelled")
"""Final statuses of batches, which no longer need their input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An object with a part of a file's content."""

    key: str
    num_bytes: int
    num_lines: int = 0

    def as_json(self) -> list[object]:
        """Return the object as it is stored in the database."""
        return [self.key, self.num_bytes, self.num_lines]


def stored_of(written: Sequence[Any]) -> Stored:  # Any: JSON
    """Decode the output of `Stored.as_json`."""
    key, num_bytes, num_lines = written
    return Stored(key=key, num_bytes=num_bytes, num_lines=num_lines)


def new_file_id(created_ms: int) -> str:
    """Return a new random id of a file."""
    return f"{PREFIX}{new_name(created_ms)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a tenant."""

    id: str
    tenant: str
    purpose: str
    filename: str
    objects: tuple[Stored, ...]
    created_ms: int
    """The time of creation, which the id contains."""

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return sum(part.num_bytes for part in self.objects)

    @property
    def body(self) -> Object:
        """The file as OpenAI's clients read it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_ms // 1000,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


def insert_file(connection: sa.Connection, file: File) -> None:
    """Add a file within a transaction."""
    row = asdict(file) | {"bytes": file.num_bytes, "objects": [part.as_json() for part in file.objects]}
    connection.execute(files.insert().values(**row))


class FileStore:
    """The files in a database. Every method raises HistoryUnavailable while the database cannot be used."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, file: File, max_bytes: int | None = None) -> None:
        """Add a file. Of concurrent uploads, exactly those that fit are added.

        Raises:
            TooManyBytes: the files and responses of its tenant would take more than `max_bytes`.
        """
        with self._database.transaction() as connection:
            if max_bytes is not None:
                lock_tenant(connection, file.tenant)
                check_room(connection, file.tenant, max(file.num_bytes, MIN_FILE_BYTES), max_bytes)
            insert_file(connection, file)

    def get(self, file_id: str, tenant: str) -> File | None:
        """Return a tenant's file; None if it does not exist."""
        if not is_id(file_id):
            return None
        query = sa.select(*files.columns).where(files.c.id == file_id, files.c.tenant == tenant)
        with self._database.reading() as connection:
            row = connection.execute(query).mappings().one_or_none()
        return None if row is None else _file(row)

    def page(self, request: PageRequest, purpose: str | None = None) -> tuple[list[File], bool]:
        """Return a page of files, and whether there are more."""
        also = () if purpose is None else (files.c.purpose == purpose,)
        with self._database.reading() as connection:
            rows, has_more = page(connection, files, request, *also)
        return [_file(row) for row in rows], has_more

    def delete(self, file_id: str, tenant: str) -> File | None:
        """Delete a tenant's file and return it; the caller must delete its objects. Return None if it does not exist.

        Raises:
            FileOfOpenBatch: an open batch reads it.
        """
        if not is_id(file_id):
            return None
        is_it = (files.c.id == file_id, files.c.tenant == tenant)
        reads = sa.select(gateway_batches.c.id).where(
            gateway_batches.c.input_file == file_id, gateway_batches.c.status.not_in(OVER)
        )
        with self._database.transaction() as connection:
            # Locked, so that no new batch can use it.
            row = connection.execute(sa.select(*files.columns).where(*is_it).with_for_update()).mappings().one_or_none()
            if row is None:
                return None
            batch = connection.execute(reads.limit(1)).scalar()
            if batch is not None:
                raise FileOfOpenBatch(f"the batch {batch} reads the file {file_id}: cancel it first")
            connection.execute(files.delete().where(*is_it))
        return _file(row)

    def old(self, before_ms: int, limit: int) -> list[tuple[str, str]]:
        """Return ids and tenants of at most `limit` files from before a time that no open batch reads."""
        reads = sa.select(gateway_batches.c.id).where(
            gateway_batches.c.input_file == files.c.id, gateway_batches.c.status.not_in(OVER)
        )
        query = sa.select(files.c.id, files.c.tenant).where(files.c.created_ms < before_ms, ~reads.exists())
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(files.c.created_ms).limit(limit)).all()
        return [(row.id, row.tenant) for row in rows]

    def known(self, file_ids: Sequence[str]) -> set[str]:
        """Return the ids that have a row, of any tenant."""
        with self._database.reading() as connection:
            return {*connection.execute(sa.select(files.c.id).where(files.c.id.in_(file_ids))).scalars()}


def _file(row: RowMapping) -> File:
    return File(
        id=row["id"],
        tenant=row["tenant"],
        purpose=row["purpose"],
        filename=row["filename"],
        objects=tuple(map(stored_of, row["objects"])),
        created_ms=row["created_ms"],
    )
