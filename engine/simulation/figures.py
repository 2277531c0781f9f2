"""Summarise a replay: throughput, latency and utilisation."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sluice.engine.simulation.replay import CompletedRequest, Replay, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Latency target of a request, in seconds."""

    ttft_s: float
    tpot_s: float

    def is_met_by(self, completed: CompletedRequest) -> bool:
        """Whether one request met both limits."""
        return completed.ttft_s <= self.ttft_s and completed.tpot_s <= self.tpot_s


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


def summarise(replay: Replay, target: Target) -> Figures:
    """Compute the figures of `replay`, which must have completed at least one request."""
    completed, steps = replay.completed, replay.steps
    first_s = min(one.arrival.at_s for one in completed)
    duration_s = max(one.end_s for one in completed) - first_s
    met = sum(target.is_met_by(one) for one in completed)
    gaps = [gap for one in completed for gap in one.gaps_s] or [0.0]
    taken_s = sum(step.taken_s for step in steps)
    computed = sum(step.work.num_tokens for step in steps)
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
        occupancy=sum(s.num_rows * s.taken_s for s in steps) / taken_s / replay.config.max_num_seqs,
        padding=sum(s.num_padding_tokens for s in steps) / computed,
        busy=taken_s / duration_s,
        kv_use=sum(s.num_held_tokens * s.taken_s for s in steps) / taken_s / replay.kv_tokens_total,
        kv_waste=_waste(steps),
        num_preemptions=replay.num_preemptions,
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
