"""Scheduling policies: the order of sequences, and which of them gives way to one of a higher class.

A policy decides which sequence joins next, computes first, and gives its blocks back last. When waiting sequences may
join, what they hold, how prompts are split and whether the batch is padded is up to the batching discipline:
`sluice.engine.scheduling.disciplines`.
"""

from itertools import takewhile

from sluice.engine.config import EngineConfig
from sluice.engine.sequence import Sequence

MAX_YIELDS = 8
"""Preemptions of a sequence in favour of higher classes; after these it gives way to no newcomer. One that runs may
still take its blocks to grow."""


class Policy:
    """First come, first served: in the order in which requests reached the engine, and none gives way.

    `running` is always in the policy's order.
    """

    def order(self, sequence: Sequence) -> tuple[int, int]:
        """Return the sort key of `sequence`: smaller goes first.

        It is total and constant: it ends with the sequence's id, which rises with each and survives preemption.
        """
        return (0, sequence.id)

    def outranks(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Return whether `sequence`, which waits, goes before one that runs although that one came first."""
        return False

    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence | None:
        """Return the running sequence that gives way to `sequence` first; None if none does."""
        return None

    def yielding(self, running: list[Sequence]) -> list[Sequence]:
        """Return those of the lowest class that would give way to a sequence of any higher class."""
        return []


class Priority(Policy):
    """Higher classes first; within a class, first come, first served. With one class, it is `fcfs`.

    Classes are strict: a sequence of a strictly higher class takes the place and the blocks of one that runs.

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
        """See `Policy.order`: by class, then by id."""
        return (-sequence.priority, sequence.id)

    def outranks(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """See `Policy.outranks`: the last one that runs is of the lowest class."""
        return bool(running) and sequence.priority > running[-1].priority

    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence | None:
        """See `Policy.victim`."""
        lower = takewhile(lambda other: other.priority < sequence.priority, reversed(running))
        return next((other for other in lower if other.num_yields < MAX_YIELDS), None)

    def yielding(self, running: list[Sequence]) -> list[Sequence]:
        """See `Policy.yielding`."""
        able = [other for other in running if other.num_yields < MAX_YIELDS]
        return [other for other in able if other.priority == able[-1].priority]


def make_policy(config: EngineConfig) -> Policy:
    """Build the policy that `config` names."""
    return Priority() if config.policy == "priority" else Policy()
