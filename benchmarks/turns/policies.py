"""Policies to compare with the fleet's: what one would write first."""

from collections.abc import Sequence

from sluice.worker.processes.turns.policy import Card, Demand, TurnRules

QUANTUM_S = 30.0


def always_to_the_oldest(demands: Sequence[Demand], card: Card, _rules: TurnRules) -> str | None:
    """Switch to the queue whose oldest job has waited longest, whenever one waits."""
    waiting = [one for one in demands if one.waiting_jobs and one.name != card.present]
    return max(waiting, key=lambda one: one.waits_s).name if waiting else card.present


def when_empty(demands: Sequence[Demand], card: Card, rules: TurnRules) -> str | None:
    """Stay until nothing is left, then go to the oldest."""
    present = next(one for one in demands if one.name == card.present)
    return card.present if present.has_work else always_to_the_oldest(demands, card, rules)


def fixed_quantum(demands: Sequence[Demand], card: Card, rules: TurnRules) -> str | None:
    """Stay for `QUANTUM_S` while there is work, then go to the next that has some."""
    present = next(one for one in demands if one.name == card.present)
    others = [one for one in demands if one.has_work and one is not present]
    if not others or (present.has_work and min(one.waits_s for one in others) < QUANTUM_S):
        return card.present
    return always_to_the_oldest(demands, card, rules)
