"""Delete objects that no row names: those of uploads and tasks that were killed, and of deleted files."""

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
"""An upload, or a task between its part and its row, takes less."""

AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What a run has done."""

    num_deleted: int
    rest: str | None = None
    """Where the next run goes on if time was up; None if all was looked at."""

    @property
    def is_over(self) -> bool:
        """Whether all was looked at."""
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
    """Delete objects without a row that are older than an age.

    Args:
        storage: Has the objects.
        files: Names those of uploads.
        batches: Names those of batches.
        min_age_s: The age.
        after: The key behind which the run begins.
        for_s: How long it works; at least as long as it took to list the keys.

    Raises:
        HistoryUnavailable, StorageUnavailable: try again later.
    """
    began_s, until_s = time.monotonic(), 0.0
    rows, num_deleted = _Rows(files, batches), 0
    for keys in _old_keys(storage, time.time() - min_age_s, after):
        until_s = until_s or time.monotonic() + max(for_s, time.monotonic() - began_s)
        gone = rows.lack(keys)
        storage.delete(gone)
        num_deleted += len(gone)
        if time.monotonic() > until_s:
            return Cleaned(num_deleted, keys[-1])
    return Cleaned(num_deleted)


def remove_old_files(storage: Storage, files: FileStore, *, before_ms: int, for_s: float = float("inf")) -> Cleaned:
    """Delete files from before a time that no open batch reads, for about so long.

    Raises:
        HistoryUnavailable, StorageUnavailable: try again later.
    """
    num_deleted, until_s = 0, time.monotonic() + for_s
    while found := files.old(before_ms, AT_ONCE):
        gone: list[File] = []
        for file_id, tenant in found:
            with suppress(FileOfOpenBatch):  # a batch of it has just begun
                gone += filter(None, (files.delete(file_id, tenant),))
        storage.delete([part.key for file in gone for part in file.objects])
        num_deleted += len(gone)
        if not gone:
            break
        if time.monotonic() > until_s:
            return Cleaned(num_deleted, "")
    return Cleaned(num_deleted)


class _Rows:
    """The rows that name objects. Those of batches are read once, when the first object of one is looked at."""

    def __init__(self, files: FileStore, batches: BatchStore) -> None:
        self._files, self._batches = files, batches
        self._named: set[str] | None = None

    def lack(self, keys: Sequence[str]) -> list[str]:
        """Return those of the keys of one folder that no row names."""
        if keys[0].startswith(f"{UPLOADS}/"):
            known = self._files.known([_file_of(key) for key in keys])
            return [key for key in keys if _file_of(key) not in known]
        if self._named is None:
            self._named = self._batches.named_objects()
        return [key for key in keys if key not in self._named]


def _old_keys(storage: Storage, before_s: float, after: str) -> Iterator[list[str]]:
    """Yield some keys of one folder at a time, in order, from behind one on."""
    for folder in sorted((UPLOADS, FOLDER)):
        if after < f"{folder}0":  # behind all of its keys
            rest = iter(sorted(key for key in storage.old_keys(folder, before_s) if key > after))
            while group := list(islice(rest, AT_ONCE)):
                yield group


def _file_of(key: str) -> str:
    return f"{PREFIX}{key.rpartition('/')[2]}"
