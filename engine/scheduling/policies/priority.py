"""Higher classes first; within a class, first come, first served. With one class, it is `fcfs`."""

from itertools import takewhile

from sluice.engine.sequence import Sequence

MAX_YIELDS = 8
"""Preemptions of a sequence in favour of higher classes; after these it gives way to no newcomer. One that runs may
still take its blocks to grow."""


class Priority:
    """Strict classes: a sequence of a strictly higher class takes the place and the blocks of one that runs.

    The victim is the last in the order: of the lowest class, the one that came last. Usually it has the least to
    recompute, and in its class it keeps "first come, first served": none waits while one that came later runs. Classes
    alone decide, never arrival, so a victim cannot take its place back from the one that took it.

    Nothing ages here: the queue decides how long a class waits, since it knows all that waits.

    Bound: let newcomers be added only where `Scheduler.room` has room for them, as a worker does. While n sequences of
    a class wait or run, those of higher classes preempt each at most `MAX_YIELDS` times, and between two of these it
    runs. So all end within n * (1 + `MAX_YIELDS`) times the steps of one of them and of a full engine of newcomers.
    Without that restriction, a class waits as long as higher ones have anything to compute.
    """

    def order(self, sequence: Sequence) -> tuple[int, int]:
        """Order by class, then by id, which rises with each sequence and survives preemption. See `Policy.order`."""
        return (-sequence.priority, sequence.id)

    def outranks(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """See `Policy.outranks`: the last one that runs is of the lowest class."""
        return bool(running) and sequence.priority > running[-1].priority

    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence | None:
        """See `Policy.victim`."""
        lower = takewhile(lambda one: one.priority < sequence.priority, reversed(running))
        return next((one for one in lower if one.num_yields < MAX_YIELDS), None)

    def yielding(self, running: list[Sequence]) -> list[Sequence]:
        """See `Policy.yielding`."""
        able = [one for one in running if one.num_yields < MAX_YIELDS]
        return [one for one in able if one.priority == able[-1].priority]
