"""An executor that computes nothing and advances a virtual clock by each step's duration.

The engine is the real one.
"""

from dataclasses import dataclass

from sluice.engine.batch import Batch, ScheduledRow
from sluice.engine.executor import Computed, ModelLimits
from sluice.engine.null_model import NullModel, NullModelConfig
from sluice.engine.scheduling.timing.step_time import StepTime, work_of


@dataclass(slots=True, eq=False)
class VirtualClock:
    """Virtual time in seconds, which advances only by calls."""

    at_s: float = 0.0

    def now_s(self) -> float:
        """Return the time."""
        return self.at_s

    def pass_s(self, seconds: float) -> None:
        """Advance the time."""
        self.at_s += seconds


class SimulatedExecutor:
    """A null model whose steps take as long as `step_time` says. It ends no sequence itself."""

    lag = 0

    def __init__(
        self, step_time: StepTime, clock: VirtualClock, cache: NullModelConfig, *, has_prompts: bool = False
    ) -> None:
        """Create an executor.

        Args:
            step_time: duration of a step.
            clock: the clock to advance.
            cache: the model's limits.
            has_prompts: keys and values of prompts come from elsewhere: computing them takes no time, except again
                after
                a preemption.
        """
        self._model = NullModel(cache)
        self._has_prompts = has_prompts
        self._step_time = step_time
        self._clock = clock
        self._has_run: dict[int, int] = {}
        """By slot: the sequence, if it ran before."""

        self._seen: set[int] = set()

    @property
    def limits(self) -> ModelLimits:
        """See `Executor.limits`."""
        return self._model.limits

    @property
    def fingerprint(self) -> str:
        """See `Executor.fingerprint`."""
        return self._model.fingerprint

    def launch(self, batch: Batch) -> Computed:
        """See `Executor.launch`."""
        self._clock.pass_s(self._step_time.of(work_of(self._charged(batch))))
        return self._model.launch(batch)

    def _charged(self, batch: Batch) -> Batch:
        if not self._has_prompts:
            return batch
        for slot, sequence_id, *_ in batch.admissions:
            if sequence_id in self._seen:
                self._has_run[slot] = sequence_id
            self._seen.add(sequence_id)
        # Only to measure its work: nothing is copied or padded.
        return Batch(tuple(row for row in batch.rows if row.num_tokens == 1 or self._is_again(row)))

    def _is_again(self, row: ScheduledRow) -> bool:
        """Whether a row computes what was computed before it was preempted."""
        return self._has_run.get(row.slot) == row.sequence_id
