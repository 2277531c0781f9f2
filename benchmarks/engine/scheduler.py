"""Python time per step outside the executor, over the null model: section "scheduler" of `benchmarks engine`.

Decode steady state: all sequences run, each samples one token per step, a block fills every 16 steps. A step is what a
worker's loop does for one: it asks `room`, then steps. Prints the median and the best window of 20 steps, in processor
time of the loop's thread: other load affects the first little and the second less.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import table
from sluice.engine.batch import Batch
from sluice.engine.config import EngineConfig
from sluice.engine.executor import Computed, TextDecoder
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import Request, Sampling
from sluice.engine.text.tokenizer import load_tokenizer

SMALL_MODEL = Path(__file__).parents[2] / "worker" / "small_model"
LIMITS_MS = {1: 0.03, 16: 0.10, 64: 0.35, 256: 1.0}
"""Limit of a step, by number of running sequences."""

_NUM_PROMPT_TOKENS = 64
_WARM_STEPS = 20
_STEPS_A_WINDOW = 20


class _TimedModel(NullModel):
    """A null model that measures its own time. It computes at once, and may report a lag."""

    def __init__(self, config: NullModelConfig, lag: int) -> None:
        super().__init__(config)
        self.lag = lag
        self.seconds = 0.0

    def launch(self, batch: Batch) -> Computed:
        begin = time.thread_time()
        launched = super().launch(batch)
        self.seconds += time.thread_time() - begin
        return launched


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Milliseconds of one step, of processor time."""

    num_running: int
    median_ms: float
    best_ms: float
    executor_ms: float
    """Time of the null model, which is not counted."""


def measure(
    num_running: int,
    *,
    decoder: TextDecoder | None = None,
    stop: tuple[str, ...] = (),
    lag: int = 0,
    num_waiting: int = 0,
    num_windows: int = 100,
) -> StepCost:
    """Measure a step of `num_running` sequences that all generate.

    Args:
        num_running: sequences.
        decoder: produces the text; the null model's tokenizer if not given.
        stop: stop strings of each request.
        lag: steps launched ahead, as on a GPU.
        num_waiting: sequences that wait besides, for one of these to end.
        num_windows: number of measured windows of 20 steps.
    """
    model = _TimedModel(NullModelConfig(num_blocks=2**17), lag)
    engine = _full_engine(model, decoder or NullTokenizer(), num_running, stop, num_waiting)
    windows: list[tuple[float, float]] = []
    for _ in range(num_windows):
        model.seconds = 0.0
        begin = time.thread_time()
        for _ in range(_STEPS_A_WINDOW):
            engine.room()
            engine.advance()
        total_s = time.thread_time() - begin
        windows.append(((total_s - model.seconds) * 1e3 / _STEPS_A_WINDOW, model.seconds * 1e3 / _STEPS_A_WINDOW))
    own = [own_ms for own_ms, _ in windows]
    return StepCost(
        num_running=num_running,
        median_ms=statistics.median(own),
        best_ms=min(own),
        executor_ms=statistics.median(executor_ms for _, executor_ms in windows),
    )


def _full_engine(
    model: NullModel, decoder: TextDecoder, num_running: int, stop: tuple[str, ...], num_waiting: int
) -> LLMEngine:
    config = EngineConfig(max_num_seqs=num_running, max_num_batched_tokens=num_running * _NUM_PROMPT_TOKENS)
    engine = LLMEngine(model, decoder, config)
    engine.add(
        Request(
            id=f"job {n}",
            prompt_token_ids=tuple((n * 7 + k) % 256 for k in range(_NUM_PROMPT_TOKENS)),
            sampling=Sampling(max_tokens=8000, seed=n, stop=stop),
        )
        for n in range(num_running + num_waiting)
    )
    for _ in range(_WARM_STEPS):
        engine.advance()
    return engine


def print_steps() -> None:
    """Print the cost of a step."""
    tokenizer = load_tokenizer(SMALL_MODEL)
    cases: list[tuple[str, TextDecoder, tuple[str, ...], int]] = [
        ("bytes", NullTokenizer(), (), 0),
        ("bytes, two stop strings", NullTokenizer(), ("\n###", "zebra crossing"), 0),
        ("the small model's tokenizer", tokenizer, (), 0),
        ("the small model's tokenizer, lag 1", tokenizer, (), 1),
    ]
    rows = [("text", "running", "median ms", "best ms", "limit ms", "null model ms")]
    for num_running, limit_ms in LIMITS_MS.items():
        costs = {name: measure(num_running, decoder=d, stop=stop, lag=lag) for name, d, stop, lag in cases}
        costs["bytes, 20,000 waiting"] = measure(num_running, num_waiting=20_000)
        for name, cost in costs.items():
            times = [f"{ms:.3f}" for ms in (cost.median_ms, cost.best_ms)]
            rows.append((name, f"{num_running}", *times, f"{limit_ms}", f"{cost.executor_ms:.3f}"))
    print(table(rows), flush=True)
