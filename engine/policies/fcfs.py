"""First come, first served: in the order in which the engine was asked."""

from engine.sequence import Sequence


class FirstComeFirstServed:
    """Nobody overtakes: a sequence waits for those before it and for nobody else."""

    def order(self, sequence: Sequence) -> tuple[float, int]:
        """See `Policy.order`. Ids rise with each sequence and stay with one that is preempted."""
        return (0.0, sequence.id)
