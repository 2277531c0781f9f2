"""Search for the batching settings that serve a traffic best with a model on this machine.

A few short runs give a model of the step time (`engine.simulation.step_time`). With it, the traffic is replayed in
virtual time for each choice of settings. The best choice and the current one are then run for real.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from sluice.engine.config import WHOLE_PROMPT_DISCIPLINES, EngineConfig
from sluice.engine.executor import Executor, ModelLimits
from sluice.engine.null_model import NullModelConfig
from sluice.engine.simulation.arrivals import Arrival
from sluice.engine.simulation.figures import Figures, Target, summarise
from sluice.engine.simulation.replay import Clock, Replay, replay, simulate
from sluice.engine.simulation.step_time import Fit, fit
from sluice.worker.config import DEFAULT_BLOCK_SIZE

MAX_NUM_SEQS = (4, 8, 16, 32, 64, 128)
MAX_NUM_BATCHED_TOKENS = (128, 256, 512, 1024, 2048, 4096)
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

    def __init__(self, load: Callable[[int], Executor], clock: Clock, config: EngineConfig) -> None:
        self.config = config
        self._load = load
        self._clock = clock
        self._loaded: tuple[int, Executor] | None = None
        self._fits: dict[int, tuple[Fit, ModelLimits]] = {}

    def run(self, arrivals: Sequence[Arrival], choice: Choice) -> Replay:
        """Run `arrivals` for real."""
        return replay(arrivals, self._executor(choice.block_size), choice.within(self.config), self._clock)

    def predict(self, arrivals: Sequence[Arrival], choice: Choice) -> Replay:
        """Replay `arrivals` in virtual time."""
        found, limits = self._measured(arrivals, choice.block_size)
        cache = NullModelConfig(
            max_model_len=limits.max_model_len, num_blocks=limits.num_blocks, block_size=limits.block_size
        )
        return simulate(arrivals, found.step_time, choice.within(self.config), cache)

    def fit(self, arrivals: Sequence[Arrival], block_size: int) -> Fit:
        """Return the model of the step time for a block size, measured at the first call."""
        return self._measured(arrivals, block_size)[0]

    def _measured(self, arrivals: Sequence[Arrival], block_size: int) -> tuple[Fit, ModelLimits]:
        if block_size not in self._fits:
            runs = [self.run(probe, choice) for probe, choice in _probes(arrivals, block_size)]
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
    burst = [replace(one, at_s=0.0, num_output_tokens=_PROBE_OUTPUT_TOKENS, max_tokens=0) for one in arrivals]
    for max_num_seqs in (_PROBE_SEQS[0], *_PROBE_SEQS):
        prompts = (burst * max_num_seqs)[: max_num_seqs + max_num_seqs // 2]
        yield prompts, Choice(max_num_seqs=max_num_seqs, max_num_batched_tokens=512, block_size=block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Predicted and measured figures of one choice."""

    choice: Choice
    predicted: Figures
    measured: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The current and the best settings."""

    current: Trial
    best: Trial
    fit: Fit
    """Step time with the best block size."""

    num_tried: int


def search(model: Model, arrivals: Sequence[Arrival], target: Target, current: Choice) -> SearchResult:
    """Find the settings under which most `arrivals` meet `target`; ties go to throughput, then to smaller settings.

    Searches pairs of sequences and token budget, then thresholds, then block sizes and the `current` settings.
    """
    seen: dict[Choice, Figures] = {}

    def predicted(choice: Choice) -> Figures:
        if choice not in seen:
            seen[choice] = summarise(model.predict(arrivals, choice), target)
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
    choice = best(replace(choice, long_prefill_token_threshold=one) for one in _thresholds(model, choice))
    choice = best([*(replace(choice, block_size=one) for one in BLOCK_SIZES), current])
    measured = {one: summarise(model.run(arrivals, one), target) for one in dict.fromkeys((choice, current))}

    def trial(choice: Choice) -> Trial:
        return Trial(choice=choice, predicted=predicted(choice), measured=measured[choice])

    return SearchResult(
        current=trial(current),
        best=trial(choice),
        fit=model.fit(arrivals, choice.block_size),
        num_tried=len(seen),
    )


def _thresholds(model: Model, choice: Choice) -> list[int]:
    if model.config.discipline in WHOLE_PROMPT_DISCIPLINES:
        return [0]
    return [one for one in THRESHOLDS if one < choice.max_num_batched_tokens]


def _worth(figures: Figures, choice: Choice) -> tuple[float, ...]:
    """Return the sort key of a choice: attainment, throughput and latency first, then smaller settings.

    Figures are rounded, so that differences below the precision of a prediction do not decide.
    """
    return (
        round(figures.attainment, 2),
        round(figures.requests_per_s, 2),
        -round(figures.tpot_p99_s, 3),
        -choice.max_num_seqs,
        -choice.max_num_batched_tokens,
        -choice.long_prefill_token_threshold,
        -choice.block_size,
    )
