"""What the scheduler is told: who goes first, and how steps are batched.

A policy is an order, and nothing else: it rules who joins next, who computes first, and who gives blocks back last.
A batching discipline is the rest: when those waiting may join, what they hold, how prompts are cut and whether the
batch is padded: `engine.policies.disciplines`.
"""

from typing import Protocol

from engine.config import EngineConfig
from engine.policies.fcfs import FirstComeFirstServed
from engine.policies.priority import Priority
from engine.sequence import Sequence


class Policy(Protocol):
    """Orders sequences, the same way for all of their life."""

    def order(self, sequence: Sequence) -> tuple[float, int]:
        """Where `sequence` stands: smaller goes first. Total (it ends with the sequence's id) and constant.

        Constant is what bounds the wait: only a sequence with a smaller value can go before, and a policy must let
        those who come ever later get ever larger values.
        """
        ...


def make_policy(config: EngineConfig) -> Policy:
    """Build the policy that `config` names."""
    if config.policy == "priority":
        return Priority(config.priority_age_step_s)
    return FirstComeFirstServed()


__all__ = ["FirstComeFirstServed", "Policy", "Priority", "make_policy"]
