"""`worker tune`: measure how long a step takes here, and find the settings that serve a traffic best. Changes nothing.

A few short runs of the model give its step time on this machine (`engine.simulation.step_time`). With it the traffic is
replayed in virtual time, once for each choice of settings; the best of them is then run for real beside the prediction.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.executor import Executor, ModelLimits
from engine.null_model import NullModelConfig
from engine.simulation.figures import Figures, Target, summarise
from engine.simulation.replay import Arrival, Clock, Replay, replay, simulate
from engine.simulation.step_time import Fit, fit
from worker.config import DEFAULT_BLOCK_SIZE

MAX_NUM_SEQS = (4, 8, 16, 32, 64, 128)
MAX_NUM_BATCHED_TOKENS = (128, 256, 512, 1024, 2048, 4096)
THRESHOLDS = (0, 64, 128, 256, 512)
BLOCK_SIZES = (16, 32, 64)

_LARGE_ERROR = 0.2
_PROBE_OUTPUT_TOKENS = 24
_PROBE_SEQS = (1, 4, 16, 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The settings that are looked for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    block_size: int = DEFAULT_BLOCK_SIZE

    @property
    def config(self) -> EngineConfig:
        """As the engine wants them."""
        return EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            # No two prompts of a replay begin alike, which a cache of them could not change.
            enable_prefix_caching=False,
        )

    @property
    def flags(self) -> str:
        """As `worker start` wants them."""
        return (
            f"--max-num-seqs {self.max_num_seqs} --max-num-batched-tokens {self.max_num_batched_tokens} "
            f"--long-prefill-token-threshold {self.long_prefill_token_threshold} --block-size {self.block_size}"
        )


_DEFAULTS = EngineConfig()
DEFAULT = Choice(
    max_num_seqs=_DEFAULTS.max_num_seqs,
    max_num_batched_tokens=_DEFAULTS.max_num_batched_tokens,
    long_prefill_token_threshold=_DEFAULTS.long_prefill_token_threshold,
    block_size=DEFAULT_BLOCK_SIZE,
)
"""What a worker does that is told nothing."""


class Model:
    """A model on this machine, loaded anew for each block size, which is what `load` takes."""

    def __init__(self, load: Callable[[int], Executor], clock: Clock) -> None:
        self._load = load
        self._clock = clock
        self._loaded: tuple[int, Executor] | None = None
        self._fits: dict[int, tuple[Fit, ModelLimits]] = {}

    def run(self, arrivals: Sequence[Arrival], choice: Choice) -> Replay:
        """Serve `arrivals` for real."""
        return replay(arrivals, self._executor(choice.block_size), choice.config, self._clock)

    def measured(self, block_size: int, arrivals: Sequence[Arrival]) -> tuple[Fit, ModelLimits]:
        """The step time with blocks of this size, and the limits of its cache; measured once."""
        if block_size not in self._fits:
            limits = self.limits(block_size)
            runs = [self.run(probe, choice) for probe, choice in _probes(arrivals, block_size)]
            steps = [(step.work, step.taken_s) for run in runs for step in run.steps]
            self._fits[block_size] = fit(steps), limits
        return self._fits[block_size]

    def limits(self, block_size: int) -> ModelLimits:
        """What it takes with blocks of this size."""
        return self._executor(block_size).limits

    def _executor(self, block_size: int) -> Executor:
        if self._loaded is None or self._loaded[0] != block_size:
            # Let go of the one before: two caches may not fit.
            self._loaded = None
            self._loaded = block_size, self._load(block_size)
        return self._loaded[1]


def _probes(arrivals: Sequence[Arrival], block_size: int) -> Iterable[tuple[list[Arrival], Choice]]:
    """Bursts of the traffic's own prompts with short outputs, in batches of several sizes; the first one warms up."""
    burst = [replace(one, at_s=0.0, num_output_tokens=_PROBE_OUTPUT_TOKENS, max_tokens=0) for one in arrivals]
    for max_num_seqs in (_PROBE_SEQS[0], *_PROBE_SEQS):
        prompts = (burst * max_num_seqs)[: max_num_seqs + max_num_seqs // 2]
        yield prompts, Choice(max_num_seqs=max_num_seqs, max_num_batched_tokens=512, block_size=block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What was found."""

    choice: Choice
    fit: Fit
    """Of the steps with the chosen block size."""

    default_predicted: Figures
    predicted: Figures
    measured: Figures
    num_tried: int


def tune(model: Model, arrivals: Sequence[Arrival], target: Target) -> Tuned:
    """Find the settings under which most of `arrivals` meet `target`, then the most come out, then the least is asked.

    Looks at all pairs of sequences and budget, then at thresholds, then at block sizes.
    """
    seen: dict[Choice, Figures] = {}

    def predicted(choice: Choice) -> Figures:
        if choice not in seen:
            found, limits = model.measured(choice.block_size, arrivals)
            seen[choice] = _predict(arrivals, found, limits, choice, target)
        return seen[choice]

    def best(choices: Iterable[Choice]) -> Choice:
        return max(choices, key=lambda choice: _worth(predicted(choice), choice))

    pairs = [
        Choice(max_num_seqs=sequences, max_num_batched_tokens=budget)
        for sequences in MAX_NUM_SEQS
        for budget in MAX_NUM_BATCHED_TOKENS
        if budget >= sequences
    ]
    choice = best(pairs)
    thresholds = [one for one in THRESHOLDS if one < choice.max_num_batched_tokens]
    choice = best([replace(choice, long_prefill_token_threshold=one) for one in thresholds])
    choice = best([replace(choice, block_size=one) for one in BLOCK_SIZES])
    default_predicted, expected = predicted(DEFAULT), predicted(choice)
    return Tuned(
        choice=choice,
        fit=model.measured(choice.block_size, arrivals)[0],
        default_predicted=default_predicted,
        predicted=expected,
        measured=summarise(model.run(arrivals, choice), target),
        num_tried=len(seen),
    )


def _predict(arrivals: Sequence[Arrival], found: Fit, limits: ModelLimits, choice: Choice, target: Target) -> Figures:
    cache = NullModelConfig(
        max_model_len=limits.max_model_len, num_blocks=limits.num_blocks, block_size=limits.block_size
    )
    return summarise(simulate(arrivals, found.step_time, choice.config, cache), target)


def _worth(figures: Figures, choice: Choice) -> tuple[float, ...]:
    """What makes one choice better than another: first what people notice, then what it costs. Rounded, so that what
    is less than a prediction can tell does not decide."""
    return (
        round(figures.attainment, 2),
        round(figures.requests_per_s, 2),
        -round(figures.tpot_p99_s, 3),
        -choice.max_num_seqs,
        -choice.max_num_batched_tokens,
        -choice.long_prefill_token_threshold,
        -choice.block_size,
    )


def report_of(tuned: Tuned, target: Target) -> str:
    """What was found, for people."""
    found = tuned.fit
    head = f"{'':<24}{'target met':>11}{'req/s':>8}{'TTFT p99 s':>12}{'TPOT mean ms':>14}{'p99 ms':>8}"
    lines = [
        f"a step takes {found.step_time}",
        f"(of {found.num_steps} steps half are within {found.median_error:.0%}, all together {found.total_error:+.0%})",
        *_warning(found),
        f"target: TTFT <= {target.ttft_s:g} s, TPOT <= {target.tpot_s * 1e3:g} ms; {tuned.num_tried} choices tried",
        "",
        head,
        _line("defaults, predicted", tuned.default_predicted),
        _line("recommended, predicted", tuned.predicted),
        _line("recommended, measured", tuned.measured),
    ]
    return "\n".join(lines)


def _warning(found: Fit) -> list[str]:
    if abs(found.total_error) <= _LARGE_ERROR:
        return []
    return ["the machine did other things meanwhile: some steps took far longer than most. Tune on a quiet one."]


def _line(name: str, figures: Figures) -> str:
    return (
        f"{name:<24}{figures.attainment:>11.0%}{figures.requests_per_s:>8.2f}{figures.ttft_p99_s:>12.2f}"
        f"{figures.tpot_mean_s * 1e3:>14.1f}{figures.tpot_p99_s * 1e3:>8.1f}"
    )
