"""Which model of a group has the device: a function of their queues, of the clock and of past switches. No I/O.

A device without work takes the next model at once. One that works is taken away once the ways there and back are the
stated share of a wait, when a deadline would be missed, or when the oldest job has waited too long; and only as far as
the stated share of all time allows, of which `Credit` keeps the account. A model that comes for shorter waits spends
that share on short turns, and its later jobs wait for credit (`python -m benchmarks turns`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

DEADLINE_AHEAD_S = 10.0
"""Time to generate that is left to a job whose deadline asks for a switch."""

SAVED_FOR_S = 600.0
"""The stated share of time holds over spans of this length."""


def weight_of(priority: int) -> float:
    """Return how much a second of waiting counts in a class: in class 4 twice as much as in class 0."""
    return 1.0 + priority / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """What a group's file states."""

    share: float = 0.1
    """Largest share of time to spend on switches that take the device from a model with work."""

    patience_s: float = 60.0
    """A job that has waited for this long comes next, whatever else waits."""

    turn_s: float = 10.0
    """Shortest turn of a model with work. It begins with computing prompts and tokens of returned jobs again: if turns
    were shorter than that, no job would end."""

    stop_s: float = 30.0
    """A worker that has not ended this long after it was asked to is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The work of one member of the group, as it was observed."""

    name: str
    waiting_jobs: int = 0
    running_jobs: int = 0
    waits_s: float = 0.0
    """How long the oldest job has waited without the device."""

    weighted_wait_s: float = 0.0
    """The largest product of a waiting job's wait and its weight (`weight_of`)."""

    weight: float = 1.0
    """The largest weight of a waiting job."""

    deadline_s: float | None = None
    """Time until the nearest deadline."""

    work_s: float | None = None
    """How long its worker needs for all that waits and runs; None if its rate is unknown."""

    can_run: bool = True
    """Whether its worker starts. One that failed to is set aside for a while."""

    @property
    def has_work(self) -> bool:
        """Whether jobs wait or run."""
        return self.waiting_jobs + self.running_jobs > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The device: who has it, and what a switch costs."""

    present: str | None
    costs: Mapping[str, float]
    """Seconds until each member is ready to generate, from asking another one to stop."""

    credit_s: float
    """Seconds that may be spent on switches now."""

    turn_s: float
    """Time since the present member was ready."""

    weight: float = 1.0
    """The largest weight of the jobs of this turn."""


def choose(demands: Sequence[Demand], card: Card, rules: TurnRules) -> str | None:
    """Return the member that should have the device; None if none can run.

    Args:
        demands: Those of all members, in the order of the file.
        card: The device. Its present member is ready.
        rules: The group's.
    """
    able = [one for one in demands if one.can_run]
    present = next((one for one in able if one.name == card.present), None)
    others = [one for one in able if one.has_work and one is not present]
    if present is not None and present.has_work:
        if card.turn_s < rules.turn_s:
            return present.name
        others = [one for one in others if _is_worth(one, present, card, rules)]
    if not others:
        return present.name if present is not None else next((one.name for one in able), None)
    chosen = max(others, key=lambda one: _urgency(one, card, rules))
    if present is not None and present.has_work and card.costs[chosen.name] > card.credit_s:
        return present.name  # no other overtakes it meanwhile
    return chosen.name


def _is_worth(one: Demand, present: Demand, card: Card, rules: TurnRules) -> bool:
    """Return whether a member's jobs are worth taking the device from one that works."""
    if one.waits_s >= rules.patience_s:
        return True
    there_s, back_s = card.costs[one.name], card.costs[present.name]
    if present.work_s is not None and present.work_s <= there_s:
        return False  # it ends by itself sooner
    return _is_pressed(one, card) or rules.share * one.weighted_wait_s >= (there_s + back_s) * card.weight


def _is_pressed(one: Demand, card: Card) -> bool:
    """Return whether a deadline is met only by a switch about now."""
    cost_s = card.costs[one.name]
    return one.deadline_s is not None and cost_s < one.deadline_s <= cost_s + DEADLINE_AHEAD_S


def _urgency(one: Demand, card: Card, rules: TurnRules) -> tuple[float, bool, float, int]:
    overdue_s = one.waits_s if one.waits_s >= rules.patience_s else 0.0
    return overdue_s, _is_pressed(one, card), one.weighted_wait_s, one.waiting_jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Seconds that may be spent on switches. Each spends its time; only one from a member with work must afford it.

    A switch from a member without work takes no time from a job, so it may leave a debt. A debt is at most the time of
    the ways back, which bounds how long others wait for it. Seconds are saved for at most `SAVED_FOR_S`.
    """

    seconds: float

    @staticmethod
    def most(costs: Mapping[str, float], rules: TurnRules) -> float:
        """Return how many seconds can be saved: enough for any switch."""
        return max(rules.share * SAVED_FOR_S, *costs.values())

    @classmethod
    def full(cls, costs: Mapping[str, float], rules: TurnRules) -> Self:
        """Return what is there at first."""
        return cls(seconds=cls.most(costs, rules))

    def grown(self, elapsed_s: float, costs: Mapping[str, float], rules: TurnRules) -> Self:
        """Return it after a time."""
        return type(self)(seconds=min(self.seconds + rules.share * elapsed_s, self.most(costs, rules)))

    def spent(self, cost_s: float, costs: Mapping[str, float]) -> Self:
        """Return it after a switch."""
        return type(self)(seconds=max(self.seconds - cost_s, -(len(costs) - 1) * max(costs.values())))
