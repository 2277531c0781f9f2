"""Finish a batch: create its files, and set its final status."""

from sluice.gateway.batches.batch import CANCELLED, CANCELLING, COMPLETED, EXPIRED, FINALIZING, IN_PROGRESS
from sluice.gateway.batches.taken import TakenBatch
from sluice.gateway.files.store import OUTPUT, File, Stored, new_file_id
from sluice.protocol.clock import wall_ms


def finish(taken: TakenBatch) -> None:
    """Create the files of a batch and set its final status, in one transaction.

    Raises:
        BatchLost: another task has the batch, or its status has changed.
    """
    if taken.row.status == IN_PROGRESS:
        taken.move(FINALIZING)
    row = taken.row
    status = EXPIRED if row.expired or row.num_collected < row.total else COMPLETED
    if row.status == CANCELLING:
        status = CANCELLED
    output, error = (
        _file(taken, kind, parts) for kind, parts in (("output", row.parts.output), ("error", row.parts.error))
    )
    taken.move(
        status,
        new_files=[file for file in (output, error) if file is not None],
        output_file=output and output.id,
        error_file=error and error.id,
        completed=row.parts.num_done,
        failed=row.total - row.parts.num_done,
    )
    if row.names is not None:
        taken.delete(row.names)


def _file(taken: TakenBatch, kind: str, parts: tuple[Stored, ...]) -> File | None:
    if not parts:
        return None
    created_ms = wall_ms()
    return File(
        id=new_file_id(created_ms),
        tenant=taken.row.tenant,
        purpose=OUTPUT,
        filename=f"{taken.row.id}_{kind}.jsonl",
        objects=parts,
        created_ms=created_ms,
    )
