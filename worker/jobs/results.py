"""The result of a job for readers, and its record for the history. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sluice.engine.request import PromptRead
from sluice.protocol.wire import (
    ChoiceResult,
    JobOptions,
    JobRecord,
    JobResult,
    JobSpec,
    PromptResult,
    Usage,
    WireError,
    encode_result,
)
from sluice.worker.jobs.channel import ChannelOutput, logprobs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The model and the worker, the same in the results and records of all jobs that name no adapter."""

    model: str
    fingerprint: str
    worker: str
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])
    """The model's adapters, each with the fingerprint of the model with it."""

    @property
    def fingerprints(self) -> str:
        """Those of all jobs that begin here, separated by spaces."""
        return " ".join((self.fingerprint, *self.adapters.values()))

    def of(self, spec: JobSpec | None) -> "Origin":
        """Return the origin of a job: that of the adapter that it names, if it does."""
        fingerprint = self.adapters.get(spec.model) if spec is not None and spec.model is not None else None
        if spec is None or spec.model is None or fingerprint is None:
            return self
        return replace(self, model=spec.model, fingerprint=fingerprint)


def usage_of(measured: JobRecord, choices: Sequence[ChannelOutput]) -> Usage:
    """Count the tokens of a job, all choices."""
    return Usage(
        prompt_tokens=measured.prompt_tokens or 0,
        output_tokens=sum([len(choice.token_ids) for choice in choices]),
        cached_tokens=measured.cached_tokens or 0,
    )


def result_of(
    origin: Origin,
    measured: JobRecord,
    choices: Sequence[ChannelOutput],
    prompt: PromptRead | None = None,
    options: JobOptions | None = None,
) -> bytes | None:
    """Encode the result of an ended job, without log-probabilities if they would exceed the bound.

    Args:
        origin: The model and the worker.
        measured: The job's record so far.
        choices: Its outputs.
        prompt: What was read of its prompt.
        options: The job's, if its prompt was read.

    Returns:
        The result; None if it is too large without them.
    """
    usage = usage_of(measured, choices)
    for with_logprobs in (True, False):
        kept = [_choice_result(choice, with_logprobs=with_logprobs) for choice in choices]
        if prompt is not None and options is not None:
            read = _prompt_result(prompt, options, with_logprobs=with_logprobs)
            kept[0] = replace(kept[0], vector=prompt.embedding, prompt=read)
        try:
            return encode_result(JobResult(choices=tuple(kept), usage=usage, model=origin.model))
        except WireError:
            continue
    return None


def _choice_result(choice: ChannelOutput, *, with_logprobs: bool) -> ChoiceResult:
    return ChoiceResult(
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=choice.end.finish_reason if choice.end else None,
        logprobs=tuple(choice.logprobs) if choice.logprobs and with_logprobs else None,
        format=choice.format,
    )


def _prompt_result(prompt: PromptRead, options: JobOptions, *, with_logprobs: bool) -> PromptResult | None:
    if prompt.logprobs is None:
        return None
    # An echo alone needs the text only.
    is_asked = options.logprobs is not None or options.prompt_logprobs is not None
    return PromptResult(
        text=prompt.text,
        token_ids=prompt.token_ids,
        is_echoed=options.echo,
        logprobs=tuple(map(logprobs_of, prompt.logprobs)) if with_logprobs and is_asked else None,
    )


def complete_record(record: JobRecord, origin: Origin, choices: Sequence[ChannelOutput], *, now_s: float) -> None:
    """Fill what is known of a job when a choice has ended, except `finish_reason`."""
    gaps_ms = sorted([gap for choice in choices for gap in choice.gaps_ms])
    gap_ms = longest_gap_ms(choices, now_s)
    earlier_ms = max([choice.waits.earlier_s for choice in choices]) * 1000
    record.model, record.fingerprint, record.worker = origin.model, origin.fingerprint, origin.worker
    record.output_tokens = sum([len(choice.token_ids) for choice in choices])
    record.itl_p50_ms, record.itl_p99_ms = percentile(gaps_ms, 0.50), percentile(gaps_ms, 0.99)
    record.itl_max_ms = max(gap_ms or 0.0, gaps_ms[-1], earlier_ms) if gaps_ms else gap_ms
    record.gap_ms = gap_ms


def longest_gap_ms(choices: Sequence[ChannelOutput], now_s: float) -> float | None:
    """Return the longest time that readers waited in this attempt, if the unpublished output reaches them now."""
    return max([gap for choice in choices if (gap := choice.longest_gap_ms(now_s)) is not None], default=None)


def percentile(ascending: list[float], fraction: float) -> float | None:
    """Return the nearest-rank percentile: the smallest value that `fraction` of all do not exceed; None for none."""
    if not ascending:
        return None
    rank = -int(-fraction * len(ascending) // 1)
    return ascending[max(rank, 1) - 1]
