"""Row slots of the running sequences, and their changes that the executor does not know (`sluice.engine.batch`)."""

from sluice.engine.batch import Admission, Batch, ScheduledRow, TableWrite
from sluice.engine.sequence import Sequence, SequenceStatus


class RowSlots:
    """Which sequence has which slot. Mutable.

    A sequence has one from its admission until the last step that has it has landed. The lowest ones are used first.
    """

    def __init__(self, num_slots: int) -> None:
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_sent = [0] * num_slots
        """By slot: leading entries of the block tables that the executor is known to have. 0: it lacks the sequence, or
        some of its tokens.
        """

        self._num_needed = [0] * num_slots
        """By slot: the tokens that an admission must have, or the executor lacks some that no step has sampled."""

        self._stale: dict[int, Sequence] = {}
        """By slot: those whose block table or tokens the executor does not have, as far as is known."""

    def __getitem__(self, row: ScheduledRow) -> Sequence:
        sequence = self._sequences[row.slot]
        if sequence is None or sequence.id != row.sequence_id:
            raise KeyError(f"slot {row.slot} does not belong to sequence {row.sequence_id}")
        return sequence

    def of(self, batch: Batch) -> list[Sequence]:
        """Return the sequence of each row of `batch`."""
        sequences = self._sequences
        return [sequence for row in batch.rows if (sequence := sequences[row[0]]) is not None]

    def assign(self, sequence: Sequence) -> int:
        """Return a free slot for `sequence`, which has just been admitted."""
        slot = self._free.pop()
        self._num_sent[slot] = self._num_needed[slot] = 0
        self._sequences[slot] = self._stale[slot] = sequence
        return slot

    def release(self, sequence: Sequence) -> None:
        """Take the slot of `sequence` back: no step in flight has it."""
        self._sequences[sequence.slot] = None
        self._stale.pop(sequence.slot, None)
        self._free.append(sequence.slot)

    def note_growth(self, sequence: Sequence) -> None:
        """Note that `sequence` has got more blocks."""
        self._stale[sequence.slot] = sequence

    def note_tokens(self, sequence: Sequence) -> None:
        """Note that `sequence` has tokens that no step has sampled: what its slot contains is sent again."""
        if self._sequences[sequence.slot] is sequence:
            self._num_sent[sequence.slot] = 0
            self._num_needed[sequence.slot] = len(sequence.token_ids)
            self._stale[sequence.slot] = sequence

    def with_writes(self, batch: Batch) -> Batch:
        """Add the writes that the executor has not confirmed, of running sequences in the step and of others.

        None of preempted ones: one may join again in its slot while the step is in flight. If the step were tried
        again then, it would restore the old table.
        """
        if not self._stale:
            return batch
        admissions: list[Admission] = []
        writes: list[TableWrite] = []
        for slot, sequence in self._stale.items():
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            if (num_sent := self._num_sent[slot]) == 0:
                admissions.append(sequence.admission(slot))
            else:
                num_entries = len(sequence.tables[-1])
                block_ids, *windowed = [tuple(table[num_sent:num_entries]) for table in sequence.tables]
                writes.append(TableWrite(slot, sequence.id, num_sent, block_ids, tuple(windowed)))
        return batch.with_writes(tuple(admissions), tuple(writes))

    def confirm(self, batch: Batch) -> None:
        """Note that a step has succeeded, and so the executor has the writes of `batch`."""
        # What was planned before a sequence was given tokens does not bring them.
        for admission in batch.admissions:
            if len(admission.token_ids) >= self._num_needed[admission.slot]:
                self._confirm(admission.slot, admission.sequence_id, len(admission.block_ids))
        for slot, sequence_id, first, block_ids, _ in batch.table_writes:
            if first <= self._num_sent[slot]:
                self._confirm(slot, sequence_id, first + len(block_ids))

    def _confirm(self, slot: int, sequence_id: int, num_blocks: int) -> None:
        sequence = self._stale.get(slot)
        if sequence is not None and sequence.id == sequence_id and num_blocks > self._num_sent[slot]:
            self._num_sent[slot] = num_blocks
            if num_blocks == len(sequence.tables[-1]):
                del self._stale[slot]

    def check_invariants(self, holders: list[Sequence]) -> None:
        """Check that exactly `holders` have a slot each.

        Raises:
            AssertionError: an invariant is violated.
        """
        held = {sequence.slot: sequence for sequence in holders}
        assert len(held) == len(holders), "two sequences have the same slot"
        assigned = {slot: sequence for slot, sequence in enumerate(self._sequences) if sequence is not None}
        assert assigned == held, "slots and sequences do not match"
        assert {*self._free, *assigned} == set(range(len(self._sequences))), "a slot is neither free nor held"
        assert len(self._free) + len(assigned) == len(self._sequences), "a slot is free twice, or free and held"
        for slot, sequence in held.items():
            is_known = self._num_sent[slot] == sequence.num_entries
            assert is_known or slot in self._stale, "the executor will never get a block table"
