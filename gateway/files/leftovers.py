"""Delete objects without a row: those of killed uploads and tasks, and of deleted files."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from sluice.gateway.batches.batch import FOLDER
from sluice.gateway.batches.store import BatchStore
from sluice.gateway.faults import FileOfOpenBatch
from sluice.gateway.files.storage import Storage
from sluice.gateway.files.store import PREFIX, UPLOADS, File, FileStore

MIN_AGE_S = 86_400.0
"""Longer than any upload takes, and any task from a part to its row."""

AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The result of a run."""

    num_deleted: int
    rest: str | None = None
    """Where the next run continues if time was up; None if the run is complete."""

    @property
    def is_over(self) -> bool:
        """Whether the run is complete."""
        return self.rest is None


def remove_leftovers(
    storage: Storage,
    files: FileStore,
    batches: BatchStore,
    *,
    min_age_s: float = MIN_AGE_S,
    after: str = "",
    for_s: float = float("inf"),
) -> Cleaned:
    """Delete objects without a row that are older than `min_age_s`.

    Args:
        storage: The objects.
        files: The table that names the objects of uploads.
        batches: The table that names the objects of batches.
        min_age_s: Least age of a deleted object.
        after: The run starts behind this key.
        for_s: Stop after this time, but work at least as long as it took to list the keys.

    Raises:
        HistoryUnavailable, StorageUnavailable: try again later.
    """
    began_s, until_s = time.monotonic(), 0.0
    rows, num_deleted = _Rows(files, batches), 0
    for keys in _old_keys(storage, time.time() - min_age_s, after):
        until_s = until_s or time.monotonic() + max(for_s, time.monotonic() - began_s)
        without_row = rows.lack(keys)
        storage.delete(without_row)
        num_deleted += len(without_row)
        if time.monotonic() > until_s:
            return Cleaned(num_deleted, keys[-1])
    return Cleaned(num_deleted)


def remove_old_files(storage: Storage, files: FileStore, *, before_ms: int, for_s: float = float("inf")) -> Cleaned:
    """Delete files created before a time that no open batch reads; stop after about `for_s`.

    Raises:
        HistoryUnavailable, StorageUnavailable: try again later.
    """
    num_deleted, until_s = 0, time.monotonic() + for_s
    while old := files.old(before_ms, AT_ONCE):
        deleted: list[File] = []
        for file_id, tenant in old:
            with suppress(FileOfOpenBatch):  # a batch of the file has just begun
                deleted += filter(None, (files.delete(file_id, tenant),))
        storage.delete([part.key for file in deleted for part in file.objects])
        num_deleted += len(deleted)
        if not deleted:
            break
        if time.monotonic() > until_s:
            return Cleaned(num_deleted, "")
    return Cleaned(num_deleted)


class _Rows:
    """The rows that name objects. Those of batches are read once, at the first object of a batch."""

    def __init__(self, files: FileStore, batches: BatchStore) -> None:
        self._files, self._batches = files, batches
        self._named: set[str] | None = None

    def lack(self, keys: Sequence[str]) -> list[str]:
        """Return the keys, all of one folder, that no row names."""
        if keys[0].startswith(f"{UPLOADS}/"):
            existing = self._files.known([_file_of(key) for key in keys])
            return [key for key in keys if _file_of(key) not in existing]
        if self._named is None:
            self._named = self._batches.named_objects()
        return [key for key in keys if key not in self._named]


def _old_keys(storage: Storage, before_s: float, after: str) -> Iterator[list[str]]:
    """Yield groups of keys of one folder, in order, from behind `after` on."""
    for folder in sorted((UPLOADS, FOLDER)):
        if after < f"{folder}0":  # "0" follows "/": unless `after` is behind all keys of the folder
            rest = iter(sorted(key for key in storage.old_keys(folder, before_s) if key > after))
            while group := list(islice(rest, AT_ONCE)):
                yield group


def _file_of(key: str) -> str:
    return f"{PREFIX}{key.rpartition('/')[2]}"
