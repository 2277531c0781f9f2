"""Sequences that wait, in the policy's order."""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from sluice.engine.scheduling.policies import Policy
from sluice.engine.sequence import Sequence, SequenceStatus


@dataclass(slots=True, eq=False)
class WaitingQueue:
    """Sequences without blocks, in the policy's order. Mutable.

    One that ends while it waits is dropped when it would be the head, or with many others: O(log n) on average.
    """

    policy: Policy
    _num_gone: int = 0
    """Entries of `_heap` that no longer wait."""

    _heap: list[tuple[tuple[float, int], Sequence]] = field(default_factory=list[tuple[tuple[float, int], Sequence]])

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    @property
    def head(self) -> Sequence:
        """The next sequence to join. The queue must not be empty."""
        return self._heap[0][1]

    def push(self, sequence: Sequence) -> None:
        """Insert `sequence` at its position."""
        heappush(self._heap, (self.policy.order(sequence), sequence))

    def pop(self) -> Sequence:
        """Remove the head."""
        head = heappop(self._heap)[1]
        self._drop_gone()
        return head

    def note_ended(self, num_sequences: int) -> None:
        """Note that `num_sequences` of the queue, whose status says so, have ended."""
        self._num_gone += num_sequences
        if self._num_gone > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[1].status is SequenceStatus.WAITING]
            heapify(self._heap)
            self._num_gone = 0
        self._drop_gone()

    def in_order(self) -> list[Sequence]:
        """Return all waiting sequences, the head first."""
        return [sequence for _, sequence in sorted(self._heap) if sequence.status is SequenceStatus.WAITING]

    def _drop_gone(self) -> None:
        while self._num_gone and self._heap[0][1].status is not SequenceStatus.WAITING:
            heappop(self._heap)
            self._num_gone -= 1
