"""A batch that a task has taken: its row, its input file and its objects."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from secrets import token_hex
from time import monotonic
from typing import BinaryIO, Self

from sluice.gateway.batches.batch import CANCELLING, StoredBatch
from sluice.gateway.batches.lines import Tick
from sluice.gateway.batches.store import BatchStore
from sluice.gateway.faults import ContentMissing, StorageUnavailable
from sluice.gateway.files.storage import Storage
from sluice.gateway.files.store import File, FileStore
from sluice.gateway.tables.database import Database
from sluice.protocol.clock import wall_ms

SLICE_S = 1.0
"""How long a task works after it has read the stored progress; then other tenants' batches have their turn."""

WORK_PER_READ = 1.0
"""Least ratio of work to reading: with a slow storage, too, half of the time is spent on work."""

MAX_WORK_S = 10.0

OVERDUE_MS = 300_000
"""How long an expired or cancelled batch waits for running jobs. Then it ends without them: their worker may be dead,
with no other worker to detect it."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """The resources of a task. Leaving the context closes them."""

    redis_url: str = field(repr=False)
    database_url: str = field(repr=False)
    storage: Storage
    database: Database

    @classmethod
    def open(cls, redis_url: str, database_url: str, files_url: str) -> Self:
        """Open the resources; they connect at the first use.

        Raises:
            HistoryUnavailable, InvalidSetting: a URL is wrong.
        """
        return cls(redis_url, database_url, Storage(files_url), Database(database_url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.database.close()

    @property
    def batches(self) -> BatchStore:
        """The table of batches."""
        return BatchStore(self.database)

    @property
    def files(self) -> FileStore:
        """The table of files."""
        return FileStore(self.database)


class TakenBatch:
    """A batch that this task has taken. Changes with each write of its row.

    Args:
        workshop: The resources.
        row: The batch as it was taken.
        tick: Checks that the work may continue.
    """

    def __init__(self, workshop: Workshop, row: StoredBatch, tick: Tick) -> None:
        self.workshop, self.row, self.tick = workshop, row, tick

    def change(self, *, new_files: Sequence[File] = (), **values: object) -> None:
        """Change fields of the row, and add files.

        Raises:
            BatchLost: another task has the batch, or its status has changed.
        """
        self.row = self.workshop.batches.change(self.row, new_files=new_files, **values)

    def move(self, status: str, *, new_files: Sequence[File] = (), **values: object) -> None:
        """Change the status, with other fields, and add files.

        Raises:
            BatchLost: as `change`.
        """
        self.row = self.workshop.batches.move(self.row, status, new_files=new_files, **values)

    def put(self, name: str, data: bytes) -> str:
        """Store an object in the folder of the batch; return its key, which is random, as those of parts are."""
        key = f"{self.row.folder}/{name}-{token_hex(6)}"
        self.workshop.storage.put(key, data)
        return key

    def delete(self, *keys: str) -> None:
        """Delete objects that are no longer needed."""
        with suppress(StorageUnavailable):  # a sweep deletes them
            self.workshop.storage.delete(list(keys))

    @contextmanager
    def input(self) -> Generator[BinaryIO]:
        """Open the input file.

        Raises:
            ContentMissing: it was deleted.
        """
        file = self.workshop.files.get(self.row.input_file, self.row.tenant)
        if file is None:
            raise ContentMissing("the input file was deleted")
        with self.workshop.storage.reading(file.objects[0].key) as opened:
            yield opened

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        return wall_ms() >= self.row.expires_ms

    @property
    def why_unsent(self) -> str | None:
        """Error of lines that will not be submitted any more, a key of `UNSENT`; None while lines are submitted."""
        if self.row.status == CANCELLING:
            return "cancelled"
        return "expired" if self.is_late else None

    @property
    def is_overdue(self) -> bool:
        """Whether the batch ends without the jobs that still run."""
        since_ms = self.row.times.get(CANCELLING, self.row.expires_ms)
        return self.why_unsent is not None and wall_ms() >= since_ms + OVERDUE_MS


def work_s(began_s: float) -> float:
    """Return how long to work after reading that began at this time of the monotonic clock, in seconds."""
    return max(SLICE_S, min(MAX_WORK_S, WORK_PER_READ * (monotonic() - began_s)))
