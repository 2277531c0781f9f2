"""Scheduling policies: the order of sequences.

A policy is only an order: it decides which sequence joins next, computes first, and gives its blocks back last. When
waiting sequences may join, what they hold, how prompts are split and whether the batch is padded is up to the batching
discipline: `sluice.engine.scheduling.disciplines`.
"""

from typing import Protocol

from sluice.engine.config import EngineConfig
from sluice.engine.scheduling.policies.fcfs import FirstComeFirstServed
from sluice.engine.scheduling.policies.priority import Priority
from sluice.engine.sequence import Sequence


class Policy(Protocol):
    """A fixed order of sequences."""

    def order(self, sequence: Sequence) -> tuple[float, int]:
        """Return the sort key of `sequence`: smaller goes first.

        It is total (it ends with the sequence's id) and constant.

        A constant key bounds the wait: only a sequence with a smaller key can go first, and a policy must give later
        arrivals ever larger keys.
        """
        ...


def make_policy(config: EngineConfig) -> Policy:
    """Build the policy that `config` names."""
    if config.policy == "priority":
        return Priority(config.priority_age_step_s)
    return FirstComeFirstServed()


__all__ = ["FirstComeFirstServed", "Policy", "Priority", "make_policy"]
