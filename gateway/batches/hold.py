"""The lease of a task on its batch, renewed on a thread, so that a slow storage or a long line does not lose it."""

import threading
from types import TracebackType
from typing import Self

from sluice.gateway.batches.batch import CANCELLING, StoredBatch
from sluice.gateway.batches.store import TAKEN_MS, BatchLost, BatchStore
from sluice.producer.errors import HistoryUnavailable

RENEW_S = TAKEN_MS / 1000 / 4


class Hold:
    """The lease of a task on its batch. Changes when the batch is lost or cancelled. Use it in a `with` statement."""

    def __init__(self, batches: BatchStore, batch: StoredBatch) -> None:
        self._batches, self._batch = batches, batch
        self._is_lost = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hold", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def check(self) -> None:
        """Check that the work may continue.

        Raises:
            BatchLost: another task has the batch, or it was cancelled in the meantime.
        """
        if self._is_lost:
            raise BatchLost(self._batch.id)

    def _run(self) -> None:
        while not self._stopping.wait(RENEW_S):
            try:
                status = self._batches.renew(self._batch)
            except HistoryUnavailable:
                continue  # the next write of the task fails too, or does not
            if status is None or (status == CANCELLING and self._batch.status != CANCELLING):
                self._is_lost = True
                return
