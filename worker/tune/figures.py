"""Summarise a replay: how many requests met the target, throughput and latency."""

from dataclasses import dataclass
from statistics import fmean

from sluice.history.percentiles import percentile
from sluice.worker.tune.replay import CompletedRequest, Replay


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
    """Figures of one replay. Times in seconds."""

    attainment: float
    """Share of the requests that met the target."""

    requests_per_s: float
    """From the first arrival to the last token."""

    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    busy_s: float
    """Time in which steps ran."""


def summarise(replay: Replay, target: Target) -> Figures:
    """Compute the figures of `replay`, which must have completed at least one request."""
    completed = replay.completed
    duration_s = max(request.end_s for request in completed) - min(request.arrival.at_s for request in completed)
    tpots_s = sorted(request.tpot_s for request in completed)
    return Figures(
        attainment=sum(target.is_met_by(request) for request in completed) / len(completed),
        requests_per_s=len(completed) / duration_s,
        ttft_p99_s=percentile(sorted(request.ttft_s for request in completed), 99),
        tpot_mean_s=fmean(tpots_s),
        tpot_p99_s=percentile(tpots_s, 99),
        busy_s=sum(step.taken_s for step in replay.steps),
    )
