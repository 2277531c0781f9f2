"""The summary of a bulk run, with the names of `vllm bench serve`. No I/O."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from sluice.history.percentiles import percentile
from sluice.protocol.calls import JobView
from sluice.protocol.wire import ChannelEntry, JobResult

WIDTH = 50


def _floats() -> "array[float]":
    return array("d")


@dataclass(slots=True, eq=False)
class Summary:
    """Counts and samples of a run, in milliseconds. Mutable; keeps the samples of every job for percentiles."""

    done: int = 0
    failed: int = 0
    bad_lines: int = 0
    missing: int = 0
    """Jobs whose outcome has expired in the queue and is not in the history."""

    missing_example: str = ""

    reasons: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    """Number and one example of failed requests and invalid lines, by error code."""

    input_tokens: int = 0
    output_tokens: int = 0
    queue_ms: "array[float]" = field(default_factory=_floats)
    ttft_ms: "array[float]" = field(default_factory=_floats)
    tpot_ms: "array[float]" = field(default_factory=_floats)
    itl_ms: "array[float]" = field(default_factory=_floats)
    e2el_ms: "array[float]" = field(default_factory=_floats)

    def add(self, view: JobView | None, result: JobResult, entries: Sequence[ChannelEntry]) -> None:
        """Add a done job; without `view`, its times are unknown. `entries`: the entries of its first channel."""
        self.done += 1
        self.input_tokens += result.usage.prompt_tokens
        self.output_tokens += result.usage.output_tokens
        if view is not None:
            self._add_times(view, result)
        self.itl_ms.extend(gaps_ms(entries))

    def _add_times(self, view: JobView, result: JobResult) -> None:
        if view.first_scheduled_ms is not None:
            self.queue_ms.append(view.first_scheduled_ms - view.submitted_ms)
        if view.ended_ms is not None:
            self.e2el_ms.append(view.ended_ms - view.submitted_ms)
        if view.first_token_ms is not None:
            self.ttft_ms.append(view.first_token_ms - view.submitted_ms)
            self._add_tpot(view.first_token_ms, view.ended_ms, result)

    def add_failure(self, code: str, example: str) -> None:
        """Add a job that is not done."""
        self.failed += 1
        self.add_reason(code, example)

    def add_missing(self, example: str) -> None:
        """Add a job whose outcome is unknown."""
        self.missing += 1
        self.missing_example = self.missing_example or example

    def add_reason(self, code: str, example: str) -> None:
        """Count a failed request or an invalid line by its error code."""
        count, first = self.reasons.get(code, (0, example))
        self.reasons[code] = count + 1, first

    def reason_lines(self) -> Iterator[str]:
        """Yield the number of failures and one example by error code, the most frequent first."""
        for code, (count, example) in sorted(self.reasons.items(), key=lambda item: -item[1][0]):
            yield f"{count} x {code}, for example {example}"

    def _add_tpot(self, first_ms: int, ended_ms: int | None, result: JobResult) -> None:
        tokens = max((len(choice.token_ids) for choice in result.choices), default=0)
        if ended_ms is not None and tokens > 1:
            self.tpot_ms.append((ended_ms - first_ms) / (tokens - 1))

    def lines(self, duration_s: float) -> Iterator[str]:
        """Yield the lines of the summary."""
        seconds = max(duration_s, 1e-9)
        yield _title(" Bulk Result ", "=")
        yield _count("Successful requests:", self.done)
        yield _count("Failed requests:", self.failed)
        if self.missing:
            yield _count("Missing results:", self.missing)
        yield _count("Bad lines:", self.bad_lines)
        yield _figure("Benchmark duration (s):", duration_s)
        yield _count("Total input tokens:", self.input_tokens)
        yield _count("Total generated tokens:", self.output_tokens)
        yield _figure("Request throughput (req/s):", self.done / seconds)
        yield _figure("Output token throughput (tok/s):", self.output_tokens / seconds)
        yield _figure("Total token throughput (tok/s):", (self.input_tokens + self.output_tokens) / seconds)
        yield from _block("Time in Queue", "Queue", self.queue_ms)
        yield from _block("Time to First Token", "TTFT", self.ttft_ms)
        yield from _block("Time per Output Token (excl. 1st token)", "TPOT", self.tpot_ms)
        yield from _block("Inter-token Latency", "ITL", self.itl_ms)
        yield from _block("End-to-end Latency", "E2EL", self.e2el_ms)
        yield "=" * WIDTH


def gaps_ms(entries: Sequence[ChannelEntry]) -> Iterator[float]:
    """Yield the gaps between tokens, in ms; tokens of one entry share the time since the previous entry."""
    with_tokens = [entry for entry in entries if entry.token_ids]
    for before, entry in pairwise(with_tokens):
        gap_ms = (entry.time_ms - before.time_ms) / len(entry.token_ids)
        yield from [gap_ms] * len(entry.token_ids)


def _block(title: str, name: str, samples: "array[float]") -> Iterator[str]:
    yield _title(title, "-")
    if not samples:
        # Without --stream, tokens are published in checkpoints, so the gaps between tokens are unknown.
        yield f"{f'Mean {name} (ms):':<40}{'n/a, see --stream' if name == 'ITL' else 'n/a'}"
        return
    ordered = sorted(samples)
    yield _figure(f"Mean {name} (ms):", sum(ordered) / len(ordered))
    yield _figure(f"Median {name} (ms):", percentile(ordered, 50))
    yield _figure(f"P99 {name} (ms):", percentile(ordered, 99))


def _title(text: str, fill: str) -> str:
    return f"{text:{fill}^{WIDTH}}"


def _count(label: str, value: int) -> str:
    return f"{label:<40}{value:<10}".rstrip()


def _figure(label: str, value: float) -> str:
    return f"{label:<40}{value:<10.2f}".rstrip()
