"""Delete objects that no row names: those of uploads and tasks that were killed, and of deleted files."""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from sluice.producer.gateway.batches.batch import FOLDER
from sluice.producer.gateway.batches.store import BatchStore
from sluice.producer.gateway.files.faults import FileInUse
from sluice.producer.gateway.files.storage import Storage
from sluice.producer.gateway.files.store import PREFIX, UPLOADS, File, FileStore

MIN_AGE_S = 86_400.0
"""An upload, or a task between its part and its row, takes less."""

AT_ONCE = 200


def remove_leftovers(storage: Storage, files: FileStore, batches: BatchStore, *, min_age_s: float = MIN_AGE_S) -> int:
    """Delete objects without a row that are older than an age; return how many.

    Raises:
        HistoryUnavailable, StorageUnavailable: try again later.
    """
    before_s = time.time() - min_age_s
    num_deleted = 0
    for keys in _grouped(storage.old_keys(UPLOADS, before_s)):
        known = files.known([_file_of(key) for key in keys])
        gone = [key for key in keys if _file_of(key) not in known]
        storage.delete(gone)
        num_deleted += len(gone)
    named: set[str] | None = None
    for keys in _grouped(storage.old_keys(FOLDER, before_s)):
        named = batches.named_objects() if named is None else named
        gone = [key for key in keys if key not in named]
        storage.delete(gone)
        num_deleted += len(gone)
    return num_deleted


def remove_old_files(storage: Storage, files: FileStore, *, before_ms: int) -> int:
    """Delete files from before a time that no open batch reads; return how many.

    Raises:
        HistoryUnavailable, StorageUnavailable: try again later.
    """
    num_deleted = 0
    while found := files.old(before_ms, AT_ONCE):
        gone: list[File] = []
        for file_id, tenant in found:
            with suppress(FileInUse):  # a batch of it has just begun
                gone += filter(None, (files.delete(file_id, tenant),))
        storage.delete([part.key for file in gone for part in file.objects])
        num_deleted += len(gone)
        if not gone:
            break
    return num_deleted


def _grouped(keys: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(keys)
    while group := list(islice(rest, AT_ONCE)):
        yield group


def _file_of(key: str) -> str:
    return f"{PREFIX}{key.rpartition('/')[2]}"
