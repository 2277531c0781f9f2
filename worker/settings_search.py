"""Find the settings that serve a traffic best with a model on this machine. Changes nothing.

A few short runs of the model give its step time here (`engine.simulation.step_time`). With it the traffic is replayed
in virtual time, once for each choice of settings; the best of them and the current ones are then run for real.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from engine.config import WHOLE_PROMPT_DISCIPLINES, EngineConfig
from engine.executor import Executor, ModelLimits
from engine.null_model import NullModelConfig
from engine.simulation.arrivals import Arrival
from engine.simulation.figures import Figures, Target, summarise
from engine.simulation.replay import Clock, Replay, replay, simulate
from engine.simulation.step_time import Fit, fit
from worker.config import DEFAULT_BLOCK_SIZE

MAX_NUM_SEQS = (4, 8, 16, 32, 64, 128)
MAX_NUM_BATCHED_TOKENS = (128, 256, 512, 1024, 2048, 4096)
THRESHOLDS = (0, 64, 128, 256, 512)
BLOCK_SIZES = (16, 32, 64)

_PROBE_OUTPUT_TOKENS = 24
_PROBE_SEQS = (1, 4, 16, 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The settings that are looked for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    block_size: int = DEFAULT_BLOCK_SIZE

    def within(self, config: EngineConfig) -> EngineConfig:
        """As the engine wants them; what is not looked for is as `config` says."""
        return replace(
            config,
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


class Model:
    """A model on this machine, loaded anew for each block size, which is what `load` takes.

    It batches as `config` says, but for what is looked for.
    """

    def __init__(self, load: Callable[[int], Executor], clock: Clock, config: EngineConfig) -> None:
        self.config = config
        self._load = load
        self._clock = clock
        self._loaded: tuple[int, Executor] | None = None
        self._fits: dict[int, tuple[Fit, ModelLimits]] = {}

    def run(self, arrivals: Sequence[Arrival], choice: Choice) -> Replay:
        """Serve `arrivals` for real."""
        return replay(arrivals, self._executor(choice.block_size), choice.within(self.config), self._clock)

    def predict(self, arrivals: Sequence[Arrival], choice: Choice) -> Replay:
        """Serve `arrivals` in virtual time."""
        found, limits = self._measured(arrivals, choice.block_size)
        cache = NullModelConfig(
            max_model_len=limits.max_model_len, num_blocks=limits.num_blocks, block_size=limits.block_size
        )
        return simulate(arrivals, found.step_time, choice.within(self.config), cache)

    def fit(self, arrivals: Sequence[Arrival], block_size: int) -> Fit:
        """The step time with blocks of this size; measured once."""
        return self._measured(arrivals, block_size)[0]

    def _measured(self, arrivals: Sequence[Arrival], block_size: int) -> tuple[Fit, ModelLimits]:
        if block_size not in self._fits:
            runs = [self.run(probe, choice) for probe, choice in _probes(arrivals, block_size)]
            steps = [(step.work, step.taken_s) for run in runs for step in run.steps]
            self._fits[block_size] = fit(steps), self._executor(block_size).limits
        return self._fits[block_size]

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
class Outcome:
    """How settings serve the traffic."""

    choice: Choice
    predicted: Figures
    measured: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found."""

    current: Outcome
    best: Outcome
    fit: Fit
    """Of the steps with the best block size."""

    num_tried: int


def search(model: Model, arrivals: Sequence[Arrival], target: Target, current: Choice) -> Found:
    """Find the settings under which most of `arrivals` meet `target`, then the most come out, then the least is asked.

    Looks at all pairs of sequences and budget, then at thresholds, then at block sizes, and at the `current` settings.
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

    def outcome(choice: Choice) -> Outcome:
        return Outcome(choice=choice, predicted=predicted(choice), measured=measured[choice])

    return Found(
        current=outcome(current),
        best=outcome(choice),
        fit=model.fit(arrivals, choice.block_size),
        num_tried=len(seen),
    )


def _thresholds(model: Model, choice: Choice) -> list[int]:
    if model.config.discipline in WHOLE_PROMPT_DISCIPLINES:
        return [0]
    return [one for one in THRESHOLDS if one < choice.max_num_batched_tokens]


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
