"""What is kept of a job when it ends: its result for readers, and its record for the history. Pure functions."""

from dataclasses import dataclass

from producer.contract.wire import ChoiceResult, JobRecord, JobResult, Usage, WireError, encode_result
from worker.channel import ChannelOutput


@dataclass(slots=True, eq=False)
class JobMeasures:
    """What is measured of a job on its way; times are the server's wall clock. Filled in as it becomes known."""

    prompt_tokens: int
    cached_tokens: int = 0
    resumed_tokens: int = 0
    preemptions: int = 0
    first_scheduled_ms: int | None = None
    first_token_ms: int | None = None
    exactness: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who generates here: the same in every result and record of this worker."""

    model: str
    fingerprint: str
    worker: str


def usage_of(measures: JobMeasures, choices: list[ChannelOutput]) -> Usage:
    """Tokens of a job, all choices."""
    return Usage(
        prompt_tokens=measures.prompt_tokens,
        output_tokens=sum(len(choice.token_ids) for choice in choices),
        cached_tokens=measures.cached_tokens,
    )


def result_of(origin: Origin, measures: JobMeasures, choices: list[ChannelOutput]) -> bytes | None:
    """The encoded result of an ended job; without log-probabilities where they would exceed the bound.

    None: it is too large even so.
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
    origin: Origin, measures: JobMeasures, choices: list[ChannelOutput], *, finish_reason: str | None
) -> JobRecord:
    """The record of a job as far as it is known; `finish_reason` is of the end that decides the job's."""
    gaps_ms = sorted(gap for choice in choices for gap in choice.gaps_ms)
    return JobRecord(
        model=origin.model,
        fingerprint=origin.fingerprint,
        worker=origin.worker,
        finish_reason=finish_reason,
        prompt_tokens=measures.prompt_tokens,
        cached_tokens=measures.cached_tokens,
        output_tokens=sum(len(choice.token_ids) for choice in choices),
        resumed_tokens=measures.resumed_tokens,
        preemptions=measures.preemptions,
        first_scheduled_ms=measures.first_scheduled_ms,
        first_token_ms=measures.first_token_ms,
        itl_p50_ms=percentile(gaps_ms, 0.50),
        itl_p99_ms=percentile(gaps_ms, 0.99),
        itl_max_ms=gaps_ms[-1] if gaps_ms else None,
        exactness=measures.exactness,
    )


def percentile(ascending: list[float], fraction: float) -> float | None:
    """The smallest value that at least `fraction` of all values do not exceed (nearest rank); None of nothing."""
    if not ascending:
        return None
    rank = -int(-fraction * len(ascending) // 1)
    return ascending[max(rank, 1) - 1]
