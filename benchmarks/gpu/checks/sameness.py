"""Identical tokens from every configuration of the engine: part of section "parity" of `benchmarks gpu`.

Recorded steps or eager ones, lag 1 or 0, ample blocks or so few that it must preempt, a prefix cache or none: in every
combination. In float32, where another order of a product's sum changes no token except in a tie.

Without a GPU the device lags as in the tests (a step is computed when the next is launched, and blocks that are reused
too early hold NaN), and recordings recompute over their buffers.
"""

import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Literal
from unittest.mock import patch

from benchmarks.gpu.models import save_small_model, tokens_of, triton_in_place_of_cpu
from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from sluice.engine.config import EngineConfig
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.executor import Executor
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullTokenizer
from sluice.engine.request import Grammar, Request, Sampling
from sluice.kernels.copy_blocks import copy_blocks

BLOCK_SIZE = 4
LETTERS = Grammar(kind="regex", text="[a-z ]{1000}")

Tokens = Mapping[tuple[str, int], list[int]]
"""By request and choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A configuration of the engine."""

    graphs: bool = False
    lag: Literal[0, 1] = 0
    is_cramped: bool = False
    """Whether there are so few blocks that running sequences are preempted."""

    has_prefix_cache: bool = False

    def __str__(self) -> str:
        parts = (
            "graphs" if self.graphs else "",
            f"lag {self.lag}",
            "preemption" if self.is_cramped else "",
            "prefix cache" if self.has_prefix_cache else "",
        )
        return ", ".join(filter(None, parts))


LAGS: tuple[Literal[0, 1], ...] = (0, 1)
WAYS = [
    Way(graphs=graphs, lag=lag, is_cramped=is_cramped, has_prefix_cache=has_prefix_cache)
    for graphs, lag, is_cramped, has_prefix_cache in product((False, True), LAGS, (False, True), (False, True))
]
"""Every combination; the first enables nothing, and the others are compared with it."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Tokens of an engine, and what happened in the run."""

    tokens: Tokens
    num_preemptions: int
    num_cached_tokens: int
    num_copying_steps: int
    """Steps in which a sequence continued in a copy of another's block."""

    num_replays: int

    def was_disturbed(self, way: Way) -> bool:
        """Whether everything that `way` enables has happened."""
        return (
            (self.num_preemptions > 0) >= way.is_cramped
            and (self.num_cached_tokens > 0) >= way.has_prefix_cache
            and (self.num_copying_steps > 0) >= way.has_prefix_cache
            and (self.num_replays > 0) >= way.graphs
        )


def same_tokens(scale: Scale, calls: Counter[str]) -> Groups:
    """Return the configurations in float32; without a GPU also interpreted.

    `calls` counts those of interpreted kernels.
    """
    eager, recorded = ([way for way in WAYS[1:] if way.graphs == graphs] for graphs in (False, True))
    in_float32 = {
        "same tokens": lambda: _compared(scale, [WAYS[0], *eager]),
        "same tokens, graphs": lambda: _compared(scale, [WAYS[0], *recorded]),
    }
    if scale.is_toy:
        return {**in_float32, "same tokens, interpreted": lambda: _interpreted(scale, calls)}
    return in_float32


@contextmanager
def _given(scale: Scale) -> Generator[tuple[Path, list[Request]]]:
    """Create the model's folder, and requests."""
    with tempfile.TemporaryDirectory() as folder:
        save_small_model("qwen3", Path(folder))
        yield Path(folder), make_requests(12, max_tokens=10 if scale.is_toy else 40)


def make_requests(count: int, *, max_tokens: int) -> list[Request]:
    """Return greedy requests, and seeded ones with each option, some with a grammar.

    Some share a prefix, and some want two choices.
    """
    random = Random(0)
    prefix = [random.randrange(2, 200) for _ in range(2 * BLOCK_SIZE + 1)]
    options: list[dict[str, float]] = [
        {"temperature": 0},
        {"temperature": 0.8, "logprobs": 2},
        {"temperature": 1.1, "top_k": 20},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.5},
        {"temperature": 1.3, "min_p": 0.02},
    ]
    grammars = [LETTERS if n % len(options) == 5 else None for n in range(count)]
    return [
        Request(
            id=str(n),
            prompt_token_ids=(
                *prefix,
                *(random.randrange(2, 200) for _ in range(random.randint(BLOCK_SIZE, 2 * BLOCK_SIZE))),
            ),
            sampling=Sampling(
                seed=n,
                max_tokens=max_tokens,
                ignore_eos=grammars[n] is None,
                **options[n % len(options)],  # pyright: ignore[reportArgumentType] - whole numbers where they must be
            ),
            num_choices=1 + (n % 4 == 1),
            grammar=grammars[n],
        )
        for n in range(count)
    ]


def _compared(
    scale: Scale, ways: Sequence[Way], asked: Sequence[Request] | None = None, note: str = ""
) -> Iterator[Line]:
    with _given(scale) as (folder, requests):
        expected = run(scale, folder, asked or requests, ways[0]).tokens
        for way in ways[1:]:
            outcome = run(scale, folder, asked or requests, way)
            is_right = outcome.tokens == expected and outcome.was_disturbed(way)
            yield Line(f"same tokens: {way}{note}", _figures(outcome, expected), is_right)


def _interpreted(scale: Scale, calls: Counter[str]) -> Iterator[Line]:
    with triton_in_place_of_cpu(calls):
        # With two choices, a penalty and a grammar, and more sequences than may run.
        asked = [request for request in make_requests(6, max_tokens=2) if request.id != "4"]
        yield from _compared(scale, [WAYS[0], Way(graphs=True, lag=1, has_prefix_cache=True)], asked, ", interpreted")


def _figures(outcome: EngineRun, expected: Tokens) -> dict[str, float | str]:
    figures: dict[str, float | str] = {
        "sequences": len(expected),
        "equal": sum(outcome.tokens.get(key) == tokens for key, tokens in expected.items()),
        "preemptions": outcome.num_preemptions,
        "cached tokens": outcome.num_cached_tokens,
        "steps with copies": outcome.num_copying_steps,
        "replays": outcome.num_replays,
    }
    difference = first_difference(outcome.tokens, expected)
    return figures | ({"differs": difference} if difference else {})


def first_difference(actual: Tokens, expected: Tokens) -> str | None:
    """Return the first prompt whose tokens differ, and where; None if there is none."""
    for key, wanted in expected.items():
        found = actual.get(key, [])
        if found != wanted:
            pairs = zip(found, wanted, strict=False)
            at = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(found), len(wanted)))
            said, meant = (tokens[at] if at < len(tokens) else "nothing" for tokens in (found, wanted))
            return f"prompt {key[0]}, choice {key[1]}, token {at}: {said} instead of {meant}"
    return None


def run(scale: Scale, folder: Path, asked: Sequence[Request], way: Way) -> EngineRun:
    """Run `asked` in that configuration; twice if steps are recorded, so that the second run replays them."""
    runner = load_model_runner(_options(scale, folder, asked, way))
    if way.graphs:
        generate(scale, _device_of(runner, scale, way), asked, way)
        while runner.has_preparations:
            runner.prepare()
    num_before = runner.graphs.num_replays if runner.graphs else 0
    with patch("sluice.engine.execution.model_runner.copy_blocks", wraps=copy_blocks) as copying:
        engine, tokens = generate(scale, _device_of(runner, scale, way), asked, way)
    return EngineRun(
        tokens=tokens,
        num_preemptions=engine.stats.num_preemptions,
        num_cached_tokens=engine.stats.num_cached_tokens,
        num_copying_steps=copying.call_count,
        num_replays=(runner.graphs.num_replays if runner.graphs else 0) - num_before,
    )


def max_num_seqs(scale: Scale) -> int:
    """Fewer than the sequences: some wait, and find the others' prefix in the cache."""
    return 4 if scale.is_toy else 9


def max_num_batched_tokens(scale: Scale) -> int:
    """Less than the prompts together: some are split."""
    return 24 if scale.is_toy else 64


def generate(scale: Scale, executor: Executor, asked: Sequence[Request], way: Way) -> tuple[LLMEngine, Tokens]:
    """Run requests to their ends."""
    config = EngineConfig(
        max_num_seqs=max_num_seqs(scale),
        max_num_batched_tokens=max_num_batched_tokens(scale),
        enable_prefix_caching=way.has_prefix_cache,
    )
    engine = LLMEngine(executor, NullTokenizer(), config)
    return engine, tokens_of(engine, asked)


def _options(scale: Scale, folder: Path, asked: Sequence[Request], way: Way) -> ModelOptions:
    longest = max(len(request.prompt_token_ids) + request.sampling.max_tokens for request in asked)
    blocks_each = -(-longest // BLOCK_SIZE)
    return ModelOptions(
        path=folder,
        device=str(scale.device),
        dtype="float32",
        block_size=BLOCK_SIZE,
        # Cramped, two fit for as long as they are short.
        num_blocks=blocks_each + 4 if way.is_cramped else 2 * len(asked) * blocks_each,
        max_num_seqs=max_num_seqs(scale),
        max_num_batched_tokens=max_num_batched_tokens(scale),
        # Products this small are slower on more threads.
        num_threads=1 if scale.is_toy else None,
        max_model_len=longest,
        graphs=way.graphs,
        lag=way.lag,
    )


def _device_of(runner: ModelRunner, scale: Scale, way: Way) -> Executor:
    """Return the runner; at lag 1 without a GPU, behind a device that lags."""
    if scale.device.type == "cuda" or not way.lag:
        return runner
    from tests.engine.lagging import on_late_device

    return on_late_device(runner)
