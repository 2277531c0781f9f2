"""What a step copies before it computes: shared tails, blocks loaded from the host tier, and blocks saved there.

A copy or load is in each step of its sequence until one has succeeded, so a failed step loses none.
"""

from dataclasses import replace

from sluice.engine.batch import Batch, BlockCopy, BlockSave
from sluice.engine.scheduling.blocks.manager import BlockManager
from sluice.engine.scheduling.row_slots import RowSlots


class StepCopies:
    """Adds copies to planned steps, and notes those that were made."""

    def __init__(self, blocks: BlockManager, slots: RowSlots) -> None:
        self._blocks = blocks
        self._slots = slots

    def add_to(self, batch: Batch) -> Batch:
        """Return `batch` with its copies."""
        saves: tuple[BlockSave, ...] = ()
        # A step without rows is not launched, and makes none.
        if batch.rows:
            saves = self._blocks.host.saves(lambda: self._filled_blocks(batch))
        if not saves and not self._blocks.num_pending_copies:
            return batch
        copies, loads = self._pending(batch)
        return replace(batch, copies=copies, loads=loads, saves=saves)

    def confirm(self, batch: Batch) -> None:
        """Note that a step with the copies of `batch` has succeeded."""
        if batch.copies or batch.loads:
            copied = {copy.sequence_id for copy in (*batch.copies, *batch.loads)}
            for row in batch.rows:
                if row.sequence_id in copied:
                    self._blocks.end_copy(self._slots[row])
        if batch.saves:
            self._blocks.host.confirm(batch.saves)

    def _pending(self, batch: Batch) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """Return the pending copies and loads of the batch's sequences.

        Not those of a sequence in a step in flight, which makes them already and may have written to the destinations.
        """
        size = self._blocks.block_size
        copies: list[BlockCopy] = []
        loads: list[BlockCopy] = []
        for sequence, row in zip(self._slots.of(batch), batch.rows, strict=True):
            if sequence.num_launched_tokens:
                continue
            if sequence.cow_sources:
                pairs = zip(sequence.cow_sources, sequence.blocks_at(row.start // size), strict=True)
                copies += [BlockCopy(sequence.id, source, destination) for source, destination in pairs]
            loads += [BlockCopy(sequence.id, source, destination) for source, destination in sequence.loads]
        return tuple(copies), tuple(loads)

    def _filled_blocks(self, batch: Batch) -> set[int]:
        """Return the blocks that a step writes: those of its tokens and drafts, and of copies and loads."""
        size = self._blocks.block_size
        filled: set[int] = set()
        for sequence, row in zip(self._slots.of(batch), batch.rows, strict=True):
            end = row.start + row.num_tokens + len(batch.drafts.get(row.sequence_id, ()))
            filled.update(sequence.block_table[row.start // size : -(-end // size)])
            filled.update(destination for _, destination in sequence.loads)
        return filled
