"""Search for the batching settings that serve a traffic best with a model on this machine.

A few short runs give a model of the step time (`engine.scheduling.timing`). With it, the traffic is replayed in
virtual time for each choice of settings. If one is predicted to be better than the current settings, both are run for
real. It is recommended only if it measures better, too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sluice.engine.config import WHOLE_PROMPT_DISCIPLINES, EngineConfig
from sluice.engine.executor import Executor, ModelLimits
from sluice.engine.null_model import NullModelConfig
from sluice.engine.scheduling.timing.fitting import Fit, fit
from sluice.worker.config import DEFAULT_BLOCK_SIZE
from sluice.worker.tune.figures import Figures, Target, summarise
from sluice.worker.tune.progress import ProgressReporter
from sluice.worker.tune.replay import Arrival, Clock, Replay, replay, simulate

MAX_NUM_SEQS = (4, 8, 16, 32, 64, 128, 256)
MAX_NUM_BATCHED_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
THRESHOLDS = (0, 64, 128, 256, 512)
BLOCK_SIZES = (16, 32, 64)

_PROBE_OUTPUT_TOKENS = 24
_PROBE_SEQS = (1, 4, 16, 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One combination of the settings that are searched."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    block_size: int = DEFAULT_BLOCK_SIZE

    def within(self, config: EngineConfig) -> EngineConfig:
        """Return `config` with these settings."""
        return replace(
            config,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            # Prompts of a replay share no prefixes.
            enable_prefix_caching=False,
        )

    @property
    def flags(self) -> str:
        """The settings as flags of `worker start`."""
        return (
            f"--max-num-seqs {self.max_num_seqs} --max-num-batched-tokens {self.max_num_batched_tokens} "
            f"--long-prefill-token-threshold {self.long_prefill_token_threshold} --block-size {self.block_size}"
        )


class Model:
    """A model on this machine. `load` loads it with a block size; settings outside the search are from `config`."""

    def __init__(
        self,
        load: Callable[[int], Executor],
        clock: Clock,
        config: EngineConfig,
        progress: ProgressReporter | None = None,
    ) -> None:
        self.config = config
        self.progress = progress or ProgressReporter()
        self._load = load
        self._clock = clock
        self._loaded: tuple[int, Executor] | None = None
        self._fits: dict[int, tuple[Fit, ModelLimits]] = {}

    def run(self, arrivals: Sequence[Arrival], choice: Choice) -> Replay:
        """Run `arrivals` for real."""
        return replay(arrivals, self._executor(choice.block_size), choice.within(self.config), self._clock)

    def predict(self, arrivals: Sequence[Arrival], choice: Choice) -> Replay:
        """Replay `arrivals` in virtual time."""
        measured, limits = self._measured(arrivals, choice.block_size)
        cache = NullModelConfig(
            max_model_len=limits.max_model_len,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            sliding_window=limits.sliding_window,
            window_groups=limits.window_groups,
        )
        return simulate(arrivals, measured.step_time, choice.within(self.config), cache)

    def fit(self, arrivals: Sequence[Arrival], block_size: int) -> Fit:
        """Return the model of the step time for a block size, measured at the first call."""
        return self._measured(arrivals, block_size)[0]

    def _measured(self, arrivals: Sequence[Arrival], block_size: int) -> tuple[Fit, ModelLimits]:
        if block_size not in self._fits:
            probes = list(_probes(arrivals, block_size))
            stage = self.progress.stage(f"measuring steps with blocks of {block_size} tokens", len(probes))
            runs = [stage.timed(lambda probe=probe: self.run(*probe)) for probe in probes]
            steps = [(step.work, step.taken_s) for run in runs for step in run.steps]
            self._fits[block_size] = fit(steps), self._executor(block_size).limits
        return self._fits[block_size]

    def _executor(self, block_size: int) -> Executor:
        if self._loaded is None or self._loaded[0] != block_size:
            # Release the previous model first: two KV caches may not fit in memory.
            self._loaded = None
            self._loaded = block_size, self._load(block_size)
        return self._loaded[1]


def _probes(arrivals: Sequence[Arrival], block_size: int) -> Iterable[tuple[list[Arrival], Choice]]:
    """Yield bursts of the traffic's prompts with short outputs, at several batch sizes. The first is a warm-up."""
    burst = [replace(arrival, at_s=0.0, num_output_tokens=_PROBE_OUTPUT_TOKENS, max_tokens=0) for arrival in arrivals]
    for max_num_seqs in (_PROBE_SEQS[0], *_PROBE_SEQS):
        prompts = (burst * max_num_seqs)[: max_num_seqs + max_num_seqs // 2]
        yield prompts, Choice(max_num_seqs=max_num_seqs, max_num_batched_tokens=512, block_size=block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredChoice:
    """Predicted and measured figures of one choice."""

    choice: Choice
    predicted: Figures
    measured: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The current settings, and the ones that are predicted to be best; the same if none is better."""

    current: MeasuredChoice
    candidate: MeasuredChoice
    fit: Fit
    """Step time with the block size of the candidate."""

    num_tried: int

    @property
    def best(self) -> MeasuredChoice:
        """The candidate if it measured better than the current settings, else these."""
        is_better = _merit(self.candidate.measured) > _merit(self.current.measured)
        return self.candidate if is_better else self.current


def search(model: Model, arrivals: Sequence[Arrival], target: Target, current: Choice) -> SearchResult:
    """Find the settings under which most `arrivals` meet `target`; ties go to throughput, then to smaller settings.

    Searches pairs of sequences and token budget, then thresholds, then block sizes.
    """
    model.fit(arrivals, BLOCK_SIZES[0])
    pairs = [
        Choice(max_num_seqs=sequences, max_num_batched_tokens=budget)
        for sequences in MAX_NUM_SEQS
        for budget in MAX_NUM_BATCHED_TOKENS
        if budget >= sequences
    ]
    seen: dict[Choice, Figures] = {}
    stage = model.progress.stage("simulating settings", len(pairs) + len(THRESHOLDS) + len(BLOCK_SIZES))

    def predicted(choice: Choice) -> Figures:
        if choice not in seen:
            model.fit(arrivals, choice.block_size)
            seen[choice] = summarise(stage.timed(lambda: model.predict(arrivals, choice)), target)
        return seen[choice]

    def best(choices: Iterable[Choice]) -> Choice:
        return max(choices, key=lambda choice: _worth(predicted(choice), choice))

    choice = best(pairs)
    choice = best(replace(choice, long_prefill_token_threshold=threshold) for threshold in _thresholds(model, choice))
    choice = best(replace(choice, block_size=size) for size in BLOCK_SIZES)
    if _merit(predicted(choice)) <= _merit(predicted(current)):
        choice = current
    trials = _run(model, arrivals, target, {each: predicted(each) for each in (current, choice)})
    return SearchResult(
        current=trials[current],
        candidate=trials[choice],
        fit=model.fit(arrivals, choice.block_size),
        num_tried=len(seen),
    )


def _run(
    model: Model, arrivals: Sequence[Arrival], target: Target, predicted: Mapping[Choice, Figures]
) -> dict[Choice, MeasuredChoice]:
    """Run choices for real. They compute for as long as predicted; pauses between arrivals are skipped."""
    estimate_s = sum(figures.busy_s for figures in predicted.values())
    stage = model.progress.stage("running settings for real", len(predicted), estimate_s=estimate_s)
    return {
        choice: MeasuredChoice(
            choice=choice,
            predicted=figures,
            measured=summarise(stage.timed(lambda choice=choice: model.run(arrivals, choice)), target),
        )
        for choice, figures in predicted.items()
    }


def _thresholds(model: Model, choice: Choice) -> list[int]:
    if model.config.discipline in WHOLE_PROMPT_DISCIPLINES:
        return [0]
    return [threshold for threshold in THRESHOLDS if threshold < choice.max_num_batched_tokens]


def _merit(figures: Figures) -> tuple[float, ...]:
    """Return attainment, throughput and latency, rounded to the precision of a prediction."""
    return round(figures.attainment, 2), round(figures.requests_per_s, 2), -round(figures.tpot_p99_s, 3)


def _worth(figures: Figures, choice: Choice) -> tuple[float, ...]:
    """Return the sort key of a choice: its merit, then smaller settings."""
    return (
        *_merit(figures),
        -choice.max_num_seqs,
        -choice.max_num_batched_tokens,
        -choice.long_prefill_token_threshold,
        -choice.block_size,
    )
