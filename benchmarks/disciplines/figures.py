"""Simulate a discipline, and summarise it: throughput, latency and utilisation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sluice.engine.batch import Batch
from sluice.engine.config import EngineConfig
from sluice.engine.executor import Computed
from sluice.engine.null_model import NullModelConfig
from sluice.engine.scheduling.timing.step_time import StepTime
from sluice.worker.tune.figures import Target
from sluice.worker.tune.replay import Arrival, CompletedRequest, Replay, SimulatedExecutor, VirtualClock, replay


class StepRecord(NamedTuple):
    """One step."""

    taken_s: float
    num_tokens: int
    num_rows: int
    """Sequences that computed."""

    num_padding_tokens: int
    num_held_tokens: int
    """Slots of the blocks that these sequences hold."""

    num_filled_tokens: int
    """Held slots with keys and values after the step."""


class ObservedExecutor(SimulatedExecutor):
    """A simulated executor that records its steps. Mutable."""

    def __init__(self, step_time: StepTime, clock: VirtualClock, cache: NullModelConfig) -> None:
        super().__init__(step_time, clock, cache)
        self.steps: list[StepRecord] = []
        self._num_blocks: dict[int, int] = {}
        """By slot."""

    def launch(self, batch: Batch) -> Computed:
        """See `Executor.launch`."""
        begin_s = self._clock.now_s()
        launched = super().launch(batch)
        for admission in batch.admissions:
            self._num_blocks[admission.slot] = len(admission.block_ids)
        for write in batch.table_writes:
            self._num_blocks[write.slot] = write.first + len(write.block_ids)
        record = StepRecord(
            taken_s=self._clock.now_s() - begin_s,
            num_tokens=batch.num_tokens + batch.num_padding_tokens,
            num_rows=len(batch.rows),
            num_padding_tokens=batch.num_padding_tokens,
            num_held_tokens=sum(self._num_blocks[row.slot] for row in batch.rows) * self.config.block_size,
            num_filled_tokens=sum(row.start + row.num_tokens for row in batch.rows),
        )
        self.steps.append(record)
        return launched


class Simulation(NamedTuple):
    """A replay in virtual time, and its steps."""

    replay: Replay
    steps: list[StepRecord]

    @property
    def completed(self) -> list[CompletedRequest]:
        """The requests."""
        return self.replay.completed


def observe(
    arrivals: Sequence[Arrival], step_time: StepTime, config: EngineConfig, cache: NullModelConfig
) -> Simulation:
    """Replay `arrivals` in virtual time."""
    clock = VirtualClock()
    executor = ObservedExecutor(step_time, clock, cache)
    return Simulation(replay(arrivals, executor, config, clock), executor.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one replay. Times in seconds; shares between 0 and 1."""

    num_requests: int
    duration_s: float
    """First arrival to last token."""

    requests_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    """Requests per second that met the target."""

    attainment: float
    """Share of the requests that met the target."""

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    itl_max_s: float
    queue_p50_s: float
    queue_p99_s: float
    e2e_mean_s: float
    normalised_mean_s: float
    """E2E over output tokens: latency as defined by the papers on Orca and vLLM."""

    occupancy: float
    """Batch slots that a sequence computed in, over time in which steps ran."""

    padding: float
    """Padding tokens over computed tokens."""

    busy: float
    """Time in which steps ran, of all time."""

    kv_use: float
    """Slots held by the sequences that computed, of the cache, over time in which steps ran."""

    kv_waste: float
    """Slots held but empty, of those held."""

    num_preemptions: int
    num_steps: int

    @property
    def utilisation(self) -> float:
        """Batch slots that computed for a request, over all time."""
        return self.occupancy * self.busy


def summarise(simulation: Simulation, target: Target) -> Figures:
    """Compute the figures of a simulation, which must have completed at least one request."""
    replayed, steps = simulation
    completed = replayed.completed
    first_s = min(one.arrival.at_s for one in completed)
    duration_s = max(one.end_s for one in completed) - first_s
    met = sum(target.is_met_by(one) for one in completed)
    gaps = [gap for one in completed for gap in one.gaps_s] or [0.0]
    taken_s = sum(step.taken_s for step in steps)
    computed = sum(step.num_tokens for step in steps)
    return Figures(
        num_requests=len(completed),
        duration_s=duration_s,
        requests_per_s=len(completed) / duration_s,
        output_tokens_per_s=sum(len(one.token_times_s) for one in completed) / duration_s,
        goodput_per_s=met / duration_s,
        attainment=met / len(completed),
        ttft_mean_s=_mean(one.ttft_s for one in completed),
        ttft_p50_s=percentile((one.ttft_s for one in completed), 50),
        ttft_p99_s=percentile((one.ttft_s for one in completed), 99),
        tpot_mean_s=_mean(one.tpot_s for one in completed),
        tpot_p99_s=percentile((one.tpot_s for one in completed), 99),
        itl_p50_s=percentile(gaps, 50),
        itl_p99_s=percentile(gaps, 99),
        itl_max_s=max(gaps),
        queue_p50_s=percentile((one.queue_s for one in completed), 50),
        queue_p99_s=percentile((one.queue_s for one in completed), 99),
        e2e_mean_s=_mean(one.e2e_s for one in completed),
        normalised_mean_s=_mean(one.e2e_s / len(one.token_times_s) for one in completed),
        occupancy=sum(s.num_rows * s.taken_s for s in steps) / taken_s / replayed.config.max_num_seqs,
        padding=sum(s.num_padding_tokens for s in steps) / computed,
        busy=taken_s / duration_s,
        kv_use=sum(s.num_held_tokens * s.taken_s for s in steps) / taken_s / replayed.kv_tokens_total,
        kv_waste=_waste(steps),
        num_preemptions=replayed.num_preemptions,
        num_steps=len(steps),
    )


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of all do not exceed."""
    return float(np.percentile(list(values), percent))


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _waste(steps: list[StepRecord]) -> float:
    held = sum(step.num_held_tokens * step.taken_s for step in steps)
    return 1 - sum(step.num_filled_tokens * step.taken_s for step in steps) / held
