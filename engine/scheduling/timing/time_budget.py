"""How many prompt tokens a step may compute beside its decodes, so that it does not take too long.

A running sequence waits for the whole step, and so for the prompts in it. The time of a step is predicted from the
steps that the engine has made (`StepTime`); what the limit leaves of it after the decodes is for prompts. A step
without decodes has no limit but its budget of tokens: nobody waits for it.

Without targets, a mixed step takes at most `StepTargets.mixed_step_s`, or half as long again as its decodes alone. With
a target for TPOT it takes at most that long. With one for TTFT it takes at most half of that: a prompt that arrives
while a step runs waits for its end, and is computed in the next. The targets are those of the requests (of their
queue), the strictest of all that decode; for a request without any, those of the engine. No prompt starves: a step
always has room for `LEAST_CHUNK` tokens of prompts.

Hot module: a step that only decodes costs nothing here, one with prompts a pass over the running sequences.
"""

from collections.abc import Iterable, Set
from math import inf

from sluice.engine.config import StepTargets
from sluice.engine.request import LatencyTargets
from sluice.engine.scheduling.timing.measured_steps import MeasuredSteps
from sluice.engine.scheduling.timing.step_time import StepWork, num_pairs
from sluice.engine.sequence import Sequence

LEAST_CHUNK = 32
"""Prompt tokens for which a step always has room."""

_SLOWER_BY = 1.5
"""A mixed step may take this many times as long as its decodes alone, even if that is over the limit."""

_GROWTH = 2
"""Limit of a mixed step's tokens, as a multiple of the largest step that was measured."""


class TimeBudget:
    """What is left for prompts of the step that is planned. Mutable."""

    def __init__(self, targets: StepTargets | None, steps: MeasuredSteps) -> None:
        """Create the budget of an engine.

        Args:
            targets: of the engine. None: without those of a request, a step has no limit but its budget of tokens.
            steps: the durations of the engine's steps.
        """
        self._targets = targets or StepTargets(mixed_step_s=inf)
        self._steps = steps
        self._is_open = False
        self._left_s = inf
        self._least: int = LEAST_CHUNK
        self._most: float = inf

    def begin(self) -> None:
        """Begin to plan a step."""
        self._is_open = False

    def take(self, start: int, num_tokens: int, running: Iterable[Sequence]) -> int:
        """Return how many of a prompt's next `num_tokens`, from token `start` on, this step computes.

        Args:
            start: tokens of the prompt before these.
            num_tokens: the rest of its budget of tokens.
            running: all running sequences; those that owe one token are the decodes of the step.
        """
        if not self._is_open:
            self._open(running)
        if self._left_s == inf:
            return num_tokens
        step_time = self._steps.step_time
        fitting = min(step_time.num_prompt_tokens(start, self._left_s), self._most)
        taken = int(min(num_tokens, max(fitting, self._least, 0)))
        work = StepWork(taken, start + taken, num_pairs(start, taken), 1)
        self._left_s -= step_time.of(work) - step_time.fixed_s
        self._least -= taken
        self._most -= taken
        return taken

    def _open(self, running: Iterable[Sequence]) -> None:
        """Find the rest of the time after the decodes."""
        self._is_open = True
        decodes = [sequence for sequence in running if sequence.num_uncomputed_tokens == 1]
        if not decodes:
            self._left_s = inf
            return
        num_decodes, num_kv_tokens = len(decodes), sum(sequence.num_tokens for sequence in decodes)
        decodes_s = self._steps.step_time.of(StepWork(num_decodes, num_kv_tokens, 0, num_decodes))
        self._left_s = self._limit_s(decodes_s, {sequence.targets for sequence in decodes}) - decodes_s
        self._least = LEAST_CHUNK
        self._most = max(0, _GROWTH * self._steps.max_tokens - num_decodes)

    def _limit_s(self, decodes_s: float, requested: Set[LatencyTargets]) -> float:
        """Return how long a step may take with decodes whose requests have these targets."""
        own = self._targets
        tpot_s = min(targets.tpot_s or own.tpot_s or inf for targets in requested)
        ttft_s = min(targets.ttft_s or own.ttft_s or inf for targets in requested)
        if tpot_s == ttft_s == inf:
            return max(own.mixed_step_s, _SLOWER_BY * decodes_s)
        return min(tpot_s, ttft_s / 2)
