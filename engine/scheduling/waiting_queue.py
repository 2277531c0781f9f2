"""Sequences that wait, in the policy's order."""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from sluice.engine.scheduling.policies import Policy
from sluice.engine.sequence import Sequence, SequenceStatus


@dataclass(slots=True, eq=False)
class WaitingQueue:
    """Sequences without blocks, in the policy's order. Mutable."""

    policy: Policy
    _heap: list[tuple[tuple[float, int], Sequence]] = field(default_factory=list[tuple[tuple[float, int], Sequence]])

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def head(self) -> Sequence:
        """The next sequence to join. The queue must not be empty."""
        return self._heap[0][1]

    def push(self, sequence: Sequence) -> None:
        """Insert `sequence` at its position."""
        heappush(self._heap, (self.policy.order(sequence), sequence))

    def pop(self) -> Sequence:
        """Remove the head."""
        return heappop(self._heap)[1]

    def keep_waiting(self) -> None:
        """Drop sequences that are no longer waiting."""
        self._heap = [entry for entry in self._heap if entry[1].status is SequenceStatus.WAITING]
        heapify(self._heap)

    def in_order(self) -> list[Sequence]:
        """Return all waiting sequences, the head first."""
        return [sequence for _, sequence in sorted(self._heap)]
