"""Python time per step outside the executor, over the null model.

    python -m benchmarks scheduler

Decode steady state: all sequences run, each samples one token per step, a block fills every 16 steps. A step is what a
worker's loop does for one: it asks `room`, then steps. Prints the median and the best window of 20 steps, in processor
time of the loop's thread: other load affects the first little and the second less.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sluice.engine.batch import Batch
from sluice.engine.config import EngineConfig
from sluice.engine.executor import Computed, TextDecoder
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import Request, SamplingParams
from sluice.engine.text.detokenizer import Detokenizer, WindowDetokenizer
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
            sampling=SamplingParams(max_tokens=8000, seed=n, stop=stop),
        )
        for n in range(num_running + num_waiting)
    )
    for _ in range(_WARM_STEPS):
        engine.advance()
    return engine


def text_ns(make: Callable[[], Detokenizer], token_ids: list[int]) -> float:
    """Return nanoseconds per token for detokenization: the best of 50 passes over `token_ids`."""
    best_s = float("inf")
    for _ in range(50):
        stream = make()
        begin = time.perf_counter()
        for token_id in token_ids:
            stream.push(token_id)
        best_s = min(best_s, time.perf_counter() - begin)
    return best_s * 1e9 / len(token_ids)


def main() -> None:
    """Print the cost of a step, and of its text alone."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    tokenizer = load_tokenizer(SMALL_MODEL)
    print(f"{'running':>8}  {'text':<34} {'median ms':>10} {'best ms':>8} {'limit ms':>9} {'null model ms':>14}")
    cases: list[tuple[str, TextDecoder, tuple[str, ...], int]] = [
        ("bytes", NullTokenizer(), (), 0),
        ("bytes, two stop strings", NullTokenizer(), ("\n###", "zebra crossing"), 0),
        ("the small model's tokenizer", tokenizer, (), 0),
        ("the small model's tokenizer, lag 1", tokenizer, (), 1),
    ]
    for num_running in LIMITS_MS:
        for name, decoder, stop, lag in cases:
            _print(name, measure(num_running, decoder=decoder, stop=stop, lag=lag))
        _print("bytes, 20,000 waiting", measure(num_running, num_waiting=20_000))
    token_ids = tokenizer.encode("The cat sat on the mat, and 12 + 30 = 42. " * 20)
    print("\nOne token to text, over sound text and the small model's tokenizer:")
    print(f"  as runs of bytes {text_ns(lambda: tokenizer.stream(skip_special_tokens=True), token_ids):.0f} ns")
    print(f"  by windows {text_ns(lambda: WindowDetokenizer(tokenizer, skip_special_tokens=True), token_ids):.0f} ns")


def _print(name: str, cost: StepCost) -> None:
    print(
        f"{cost.num_running:>8}  {name:<34} {cost.median_ms:>10.3f} {cost.best_ms:>8.3f} "
        f"{LIMITS_MS[cost.num_running]:>9} {cost.executor_ms:>14.3f}"
    )


if __name__ == "__main__":
    main()
