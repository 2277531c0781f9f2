"""Continue a batch as far as possible now: check its file, submit its lines, collect outcomes, finish it.

A task works for some seconds and stores its progress in the database, so it may be killed at any point: the next task
continues from there. While the file is checked, the task enforces the batch's deadline; then the queue's timer does.
"""

from contextlib import suppress
from time import monotonic

from sluice.gateway.batches.batch import CANCELLED, CANCELLING, EXPIRED, FAILED, VALIDATING
from sluice.gateway.batches.checking import INPUT_MISSING, check_slice, kept_names
from sluice.gateway.batches.collecting import Collector
from sluice.gateway.batches.finishing import finish
from sluice.gateway.batches.hold import Hold
from sluice.gateway.batches.lines import Names
from sluice.gateway.batches.running import Run
from sluice.gateway.batches.store import BatchLost
from sluice.gateway.batches.taken import TakenBatch, Workshop, work_s
from sluice.gateway.faults import ContentMissing
from sluice.producer.bulk.recorded import RecordedOutcomes
from sluice.producer.client import Producer
from sluice.producer.errors import BatchNotFound
from sluice.protocol.clock import wall_ms

PATIENCE_S = 5.0
MIN_PAUSE_MS, MAX_PAUSE_MS = 500, 5000
"""A batch that waits for its jobs is looked at again after a twentieth of its age, within these bounds."""


def advance(workshop: Workshop, batch_id: str, epoch: int) -> None:
    """Continue a batch, unless another task has it.

    Raises:
        ProducerError: the queue, the database or the storage is unreachable. The batch is continued later.
    """
    row = workshop.batches.take(batch_id, epoch)
    if row is None:
        return
    pause_ms = 0
    # Lost: it was cancelled, and another task ends it at once; or another task has it already.
    with suppress(BatchLost), Hold(workshop.batches, row) as hold:
        pause_ms = _advance(TakenBatch(workshop, row, hold.check))
    workshop.batches.release(row, pause_ms)


def _advance(taken: TakenBatch) -> int:
    """Continue until there is nothing to do or time is up; return the pause until the next task, in ms.

    Raises:
        BatchLost: another task has the batch, or its status has changed.
        ProducerError: as `advance`.
    """
    if taken.row.status == VALIDATING and not taken.is_late and not check_slice(taken):
        return 0
    if taken.row.status == FAILED:
        return 0
    if not taken.row.total:
        # It was cancelled or expired before its file was checked.
        taken.move(CANCELLED if taken.row.status == CANCELLING else EXPIRED)
        return 0
    queue, began_s = taken.row.queue, monotonic()
    with (
        # Without the batch's number of partitions, which only the ids of its jobs need: the workers may have
        # changed theirs since.
        Producer(taken.workshop.redis_url, queue=queue, patience_s=PATIENCE_S) as producer,
        RecordedOutcomes(taken.workshop.database_url, queue) as recorded,
    ):
        producer.target.partitions = taken.row.partitions  # while no worker has stated one
        names = _names(taken, producer)
        if names is None:
            return 0
        collector = Collector(producer, taken.row, names, recorded, taken.input)
        until_s = monotonic() + work_s(began_s)
        run = Run(taken, producer, collector, until_s)
        while run.step():
            if monotonic() > until_s:
                return 0
    return min(MAX_PAUSE_MS, MIN_PAUSE_MS + (wall_ms() - taken.row.created_ms) // 20)


def _names(taken: TakenBatch, producer: Producer) -> Names | None:
    """Return the custom ids; None if they are lost, and the batch was ended with the outcomes that it has.

    Raises:
        StorageUnavailable: they cannot be read now, or they are lost while lines are still submitted.
    """
    try:
        return kept_names(taken)
    except ContentMissing:
        if taken.why_unsent is None:
            raise
    with suppress(BatchNotFound):
        producer.cancel_batch(taken.row.id, reason="the input file of the batch is missing")
    taken.change(errors=[INPUT_MISSING])
    finish(taken)
    return None
