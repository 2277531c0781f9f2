"""First come, first served: in the order in which requests reached the engine."""

from sluice.engine.sequence import Sequence


class FirstComeFirstServed:
    """No overtaking: a sequence waits only for those before it."""

    def order(self, sequence: Sequence) -> tuple[float, int]:
        """Order by id, which rises with each sequence and survives preemption. See `Policy.order`."""
        return (0.0, sequence.id)
