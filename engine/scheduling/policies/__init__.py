"""Scheduling policies: the order of sequences, and which of them gives way to one of a higher class.

A policy decides which sequence joins next, computes first, and gives its blocks back last. When waiting sequences may
join, what they hold, how prompts are split and whether the batch is padded is up to the batching discipline:
`sluice.engine.scheduling.disciplines`.
"""

from typing import Protocol

from sluice.engine.config import EngineConfig
from sluice.engine.scheduling.policies.fcfs import FirstComeFirstServed
from sluice.engine.scheduling.policies.priority import Priority
from sluice.engine.sequence import Sequence


class Policy(Protocol):
    """A fixed order of sequences. `running` is always in this order."""

    def order(self, sequence: Sequence) -> tuple[int, int]:
        """Return the sort key of `sequence`: smaller goes first.

        It is total (it ends with the sequence's id) and constant.
        """
        ...

    def outranks(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Return whether `sequence`, which waits, goes before one that runs although that one came first."""
        ...

    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence | None:
        """Return the running sequence that gives way to `sequence` first; None if none does."""
        ...

    def yielding(self, running: list[Sequence]) -> list[Sequence]:
        """Return those of the lowest class that would give way to a sequence of any higher class."""
        ...


def make_policy(config: EngineConfig) -> Policy:
    """Build the policy that `config` names."""
    return Priority() if config.policy == "priority" else FirstComeFirstServed()


__all__ = ["FirstComeFirstServed", "Policy", "Priority", "make_policy"]
