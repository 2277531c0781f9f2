"""What the executor keeps of each running sequence, by its row slot (`sluice.engine.batch`). Knows no tensors.

The scheduler writes it through batches; the sampled tokens are added here when a step is collected, at their positions.
Both may be repeated. Nothing is dropped when a sequence ends: the next one to get its slot replaces it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from sluice.engine.batch import Admission, Batch, Sampled, ScheduledRow, TableWrite
from sluice.engine.request import Sampling


@dataclass(slots=True, eq=False)
class Slot:
    """A running sequence, as steps need it. Mutable: its tokens, its table and the sampler's notes of it grow.

    The first blocks of one object never change: a copy of its table needs only those that came.
    """

    index: int
    """Of its row slot."""

    sequence_id: int
    choice: int
    sampling: Sampling
    num_prompt_tokens: int
    token_ids: list[int]
    """Prompt and output, as far as the host knows them."""

    num_blocks: int
    adapter_place: int = -1
    """Of its adapter; -1 without one."""

    options: bytes = b""
    """Its sampling options as they are sent to the device; empty until they were first needed."""

    num_counted: int = 0
    """Leading tokens that are counted for its penalties (`sampling.seen_tokens`)."""


class Slots:
    """The slots of one executor, and their block tables."""

    def __init__(self, num_slots: int, max_blocks_per_seq: int, *, window_groups: int = 0) -> None:
        # One slot more, the last, is for probes: see `isolation`.
        self._slots: list[Slot | None] = [None] * (num_slots + 1)
        self.tables = np.zeros((num_slots + 1, max_blocks_per_seq), dtype=np.int32)
        """Block ids of each slot; beyond `Slot.num_blocks` they are those of earlier sequences."""

        self.window_tables = np.zeros((window_groups, *self.tables.shape), dtype=np.int32)
        """The same for each window group; entries before the window are any."""

    def __getitem__(self, row: ScheduledRow) -> Slot:
        slot = self._slots[row.slot]
        if slot is None or slot.sequence_id != row.sequence_id:
            raise KeyError(f"slot {row.slot} does not have sequence {row.sequence_id}")
        return slot

    def has(self, sequence_id: int) -> bool:
        """Return whether any slot has this sequence, or had it last."""
        return any(slot is not None and slot.sequence_id == sequence_id for slot in self._slots)

    def write(self, batch: Batch) -> None:
        """Make the writes of `batch`."""
        for admission in batch.admissions:
            self._admit(admission)
        for write in batch.table_writes:
            held = self._slots[write.slot]
            # The sequence may have left between two attempts at a step.
            if held is not None and held.sequence_id == write.sequence_id:
                held.num_blocks = self._write_tables(write, write.first)

    def add_tokens(self, rows: Iterable[ScheduledRow], sampled: Iterable[Sampled]) -> None:
        """Write the tokens that `rows`, all of which sample, have sampled."""
        for row, result in zip(rows, sampled, strict=True):
            held = self._slots[row.slot]
            end = row.start + row.num_tokens
            # It may have left, or have failed in the step before.
            if held is not None and held.sequence_id == row.sequence_id and end <= len(held.token_ids):
                held.token_ids[end : end + len(result.token_ids)] = result.token_ids

    def _write_tables(self, write: Admission | TableWrite, first: int) -> int:
        """Write the blocks of `write` from entry `first` on, and return how many entries there are now."""
        num_blocks = first + len(write.block_ids)
        self.tables[write.slot, first:num_blocks] = write.block_ids
        if write.window_ids:
            self.window_tables[:, write.slot, first:num_blocks] = write.window_ids
        return num_blocks

    def _has_kept(self, held: Slot, admission: Admission) -> bool:
        """Whether all blocks of a slot are the first ones of an admission: then copies of them are valid."""
        kept = admission.block_ids[: held.num_blocks]
        return not admission.window_ids and tuple(self.tables[held.index, : held.num_blocks].tolist()) == kept

    def _admit(self, admission: Admission) -> None:
        held = self._slots[admission.slot]
        if held is not None and held.sequence_id == admission.sequence_id:
            # Repeated, preempted meanwhile, or forced: tokens sampled since it was planned are still its own.
            held.token_ids[: len(admission.token_ids)] = admission.token_ids
            has_kept = self._has_kept(held, admission)
            num_blocks = self._write_tables(admission, 0)
            # Preempted and running again, it may have its adapter in another place.
            place = admission.adapter_place
            if has_kept and held.adapter_place == place:
                held.num_blocks = num_blocks
            else:
                self._slots[admission.slot] = replace(held, num_blocks=num_blocks, adapter_place=place)
            return
        num_blocks = self._write_tables(admission, 0)
        self._slots[admission.slot] = Slot(
            index=admission.slot,
            sequence_id=admission.sequence_id,
            choice=admission.choice,
            sampling=admission.sampling,
            num_prompt_tokens=admission.num_prompt_tokens,
            token_ids=list(admission.token_ids),
            num_blocks=num_blocks,
            adapter_place=admission.adapter_place,
        )
