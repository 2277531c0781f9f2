"""First come, first served: in the order in which requests reached the engine."""

from sluice.engine.sequence import Sequence


class FirstComeFirstServed:
    """No overtaking: a sequence waits only for those before it. None gives way."""

    def order(self, sequence: Sequence) -> tuple[int, int]:
        """Order by id, which rises with each sequence and survives preemption. See `Policy.order`."""
        return (0, sequence.id)

    def outranks(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """See `Policy.outranks`."""
        return False

    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence | None:
        """See `Policy.victim`."""
        return None

    def yielding(self, running: list[Sequence]) -> list[Sequence]:
        """See `Policy.yielding`."""
        return []
