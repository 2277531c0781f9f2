"""The result of a job for readers, and its record for the history. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.engine.request import SamplingParams
from sluice.protocol.wire import ChoiceResult, JobRecord, JobResult, ResolvedOptions, Usage, WireError, encode_result
from sluice.worker.jobs.channel import ChannelOutput


@dataclass(slots=True, eq=False)
class JobMeasures:
    """Counts and times of a job; times are of the server's wall clock. Written by `HeldJob` alone."""

    prompt_tokens: int
    cached_tokens: int = 0
    resumed_tokens: int = 0
    preemptions: int = 0
    preemption_times: tuple[tuple[int, int | None], ...] = ()
    preempted_ms: int = 0
    first_scheduled_ms: int | None = None
    first_token_ms: int | None = None
    last_token_ms: int | None = None
    """Of this attempt."""

    resolved: ResolvedOptions | None = None
    exactness: str | None = None

    @property
    def computed_prompt_tokens(self) -> int | None:
        """The prompt's tokens, if the job was ever scheduled: one that was refused before costs nothing.

        Until its translation, `prompt_tokens` is the estimate of the submit.
        """
        is_scheduled = self.first_scheduled_ms is not None or self.first_token_ms is not None
        return self.prompt_tokens if is_scheduled else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The model and the worker, the same in every result and record of this worker."""

    model: str
    fingerprint: str
    worker: str


def resolved_of(sampling: SamplingParams) -> ResolvedOptions:
    """Return what a request is sampled with, as far as a model may state defaults for it."""
    return ResolvedOptions(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        end_token_ids=tuple(sorted(sampling.end_token_ids or ())),
    )


def usage_of(measures: JobMeasures, choices: Sequence[ChannelOutput]) -> Usage:
    """Count the tokens of a job, all choices."""
    return Usage(
        prompt_tokens=measures.computed_prompt_tokens or 0,
        output_tokens=sum(len(choice.token_ids) for choice in choices),
        cached_tokens=measures.cached_tokens,
    )


def result_of(origin: Origin, measures: JobMeasures, choices: Sequence[ChannelOutput]) -> bytes | None:
    """Encode the result of an ended job, without log-probabilities if they would exceed the bound.

    Returns:
        The result; None if it is too large without them.
    """
    usage = usage_of(measures, choices)
    for with_logprobs in (True, False):
        kept = tuple(_choice_result(choice, with_logprobs=with_logprobs) for choice in choices)
        try:
            return encode_result(JobResult(choices=kept, usage=usage, model=origin.model))
        except WireError:
            continue
    return None


def _choice_result(choice: ChannelOutput, *, with_logprobs: bool) -> ChoiceResult:
    return ChoiceResult(
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=choice.end.finish_reason if choice.end else None,
        logprobs=tuple(choice.logprobs) if choice.logprobs and with_logprobs else None,
    )


def record_of(
    origin: Origin,
    measures: JobMeasures,
    choices: Sequence[ChannelOutput],
    *,
    finish_reason: str | None,
    now_s: float,
) -> JobRecord:
    """Make the record of a job; `finish_reason` belongs to the end that decides the job's state."""
    gaps_ms = sorted(gap for choice in choices for gap in choice.gaps_ms)
    gap_ms = longest_gap_ms(choices, now_s)
    earlier_ms = max(choice.waits.earlier_s for choice in choices) * 1000
    return JobRecord(
        model=origin.model,
        fingerprint=origin.fingerprint,
        worker=origin.worker,
        finish_reason=finish_reason,
        prompt_tokens=measures.computed_prompt_tokens,
        cached_tokens=measures.cached_tokens,
        output_tokens=sum(len(choice.token_ids) for choice in choices),
        resumed_tokens=measures.resumed_tokens,
        preemptions=measures.preemptions,
        preemption_times=measures.preemption_times,
        preempted_ms=measures.preempted_ms,
        first_scheduled_ms=measures.first_scheduled_ms,
        first_token_ms=measures.first_token_ms,
        last_token_ms=measures.last_token_ms,
        itl_p50_ms=percentile(gaps_ms, 0.50),
        itl_p99_ms=percentile(gaps_ms, 0.99),
        itl_max_ms=max(gap_ms or 0.0, gaps_ms[-1], earlier_ms) if gaps_ms else gap_ms,
        gap_ms=gap_ms,
        resolved=measures.resolved,
        exactness=measures.exactness,
    )


def longest_gap_ms(choices: Sequence[ChannelOutput], now_s: float) -> float | None:
    """Return the longest time that readers waited in this attempt, if the unpublished output reaches them now."""
    return max((gap for choice in choices if (gap := choice.longest_gap_ms(now_s)) is not None), default=None)


def percentile(ascending: list[float], fraction: float) -> float | None:
    """Return the nearest-rank percentile: the smallest value that `fraction` of all do not exceed; None for none."""
    if not ascending:
        return None
    rank = -int(-fraction * len(ascending) // 1)
    return ascending[max(rank, 1) - 1]
