"""The scheduler of each batching discipline."""

from collections.abc import Callable

from sluice.engine.config import EngineConfig
from sluice.engine.executor import ModelLimits
from sluice.engine.scheduling.comparison.fixed_batches import FixedBatches
from sluice.engine.scheduling.comparison.mixed_steps import EqualSlots, Orca, PrefillFirst
from sluice.engine.scheduling.continuous import ContinuousScheduler
from sluice.engine.scheduling.scheduler import Scheduler
from sluice.engine.speculation.source import DraftSource


def make_scheduler(
    config: EngineConfig,
    limits: ModelLimits,
    clock: Callable[[], float],
    draft_source: DraftSource | None = None,
    *,
    lag: int = 0,
) -> Scheduler:
    """Make the scheduler of the discipline that `config` names; only `continuous` uses a `draft_source` and a lag."""
    if config.discipline == "continuous":
        return ContinuousScheduler(config, limits, clock, draft_source, lag=lag)
    if config.discipline == "static":
        return FixedBatches(config, limits, clock, window_s=0.0)
    if config.discipline == "dynamic":
        return FixedBatches(config, limits, clock, window_s=config.batch_window_s)
    kinds = {"prefill-first": PrefillFirst, "slots": EqualSlots, "orca": Orca}
    return kinds[config.discipline](config, limits, clock)
