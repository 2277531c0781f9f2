"""The step time of this engine, measured while it runs (`StepTime`).

Hot module: of steps that only decode, one in 32 is measured, in constant time and a pass over its rows. A fit takes as
long as some hundred rows, so it is made when it is asked for, and not after each step.
"""

from sluice.engine.batch import Batch
from sluice.engine.scheduling.timing.fitting import StepMoments
from sluice.engine.scheduling.timing.step_time import StepTime, work_of

_KEEP = 0.98
"""Share of earlier steps that a measured one leaves: about the last fifty count."""

_EVERY = 32
"""Every 32nd step that only decodes is measured."""

_FIT_EVERY = 8
"""Every 8th measured step leads to another fit."""

_FEW = 32
"""Until this many steps are measured, every `_FIT_EVERY`th that only decodes is, and each leads to another fit."""


class MeasuredSteps:
    """The step time, as the latest steps show it. Changes with each measured step.

    Steps with and without prompts are forgotten apart: hours of decodes do not erase the cost of a prompt.
    """

    def __init__(self) -> None:
        self._decodes = StepMoments(_KEEP)
        self._mixed = StepMoments(_KEEP)
        self._num_decodes = 0
        self._num_measured = 0
        self._step_time: StepTime | None = None
        self.max_tokens = 0
        """Tokens of the largest step that was measured."""

    def note(self, batch: Batch, taken_s: float) -> None:
        """Measure a step that has succeeded, unless it is one of many that only decode."""
        # A sequence that computes its prompt is among the last, unless it is of a higher class.
        if batch.rows[-1].num_tokens == 1:
            self._num_decodes += 1
            if self._num_decodes % (_FIT_EVERY if self._num_measured < _FEW else _EVERY):
                return
        if taken_s <= 0:
            return
        work = work_of(batch)
        moments = self._mixed if work.num_pairs else self._decodes
        moments.add(work, taken_s)
        self._num_measured += 1
        if self._num_measured <= _FEW or self._num_measured % _FIT_EVERY == 0:
            self._step_time = None
        self.max_tokens = max(self.max_tokens, work.num_tokens)

    @property
    def step_time(self) -> StepTime:
        """The step time that fits these steps; zero before the first."""
        if self._step_time is None:
            self._step_time = (self._decodes + self._mixed).step_time()
        return self._step_time
