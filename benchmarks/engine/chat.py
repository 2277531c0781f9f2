"""Time to first token of a chat's later turns, compared with a fresh prompt of only the new text.

    python -m benchmarks chat [--conversations 5] [--turns 10] [--new 96] [--output 64] [--threads N]

The bare engine on the random 100 M Llama of `benchmarks.engine.models` in bf16, with the prefix cache, one request at a
time. Each turn repeats the conversation so far, adds `--new` tokens, and is answered with `--output` tokens. Also,
alternately before and after: a fresh prompt of the number of new tokens, and one of the number of tokens that the turn
computed (the last token of an answer is not cached, nor are evicted ones). The last column is the remainder: attention
to the conversation so far, and the engine's own work on a longer prompt. Medians of all conversations but the first.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from statistics import median

import torch

from benchmarks.engine.bare import Words
from benchmarks.engine.models import VOCAB_SIZE, model_folder
from sluice.engine.config import EngineConfig
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.execution.threads import limit_spinning
from sluice.engine.executor import Executor
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Request, SamplingParams, TokenDelta

SHAPE = "llama-100m"
LIMIT = 1.3
"""Limit of a later turn's TTFT over that of a fresh prompt of only its new text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a conversation: turns, new tokens per turn, and answer tokens."""

    num_turns: int = 10
    num_new_tokens: int = 96
    num_output_tokens: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of one prompt."""

    ttft_s: float
    token_ids: list[int]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn's time to first token, and the reference times."""

    num_prompt_tokens: int
    num_computed_tokens: int
    """Prompt tokens that were not in the prefix cache."""

    ttft_s: float
    fresh_s: float
    """TTFT of a fresh prompt of the new tokens only."""

    as_long_s: float
    """TTFT of a fresh prompt of `num_computed_tokens`."""


class Chats:
    """Conversations with an engine, one request at a time."""

    def __init__(self, executor: Executor, shape: Shape, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = LLMEngine(executor, Words(executor.limits.vocab_size), EngineConfig(), clock=clock)
        self._shape = shape
        self._clock = clock
        self._ids = count()
        self._random = Random(0)
        self._known_ids = range(3, min(VOCAB_SIZE, executor.limits.vocab_size))

    def converse(self) -> list[Turn]:
        """Run one conversation, turn by turn."""
        said: list[int] = []
        turns: list[Turn] = []
        for index in range(self._shape.num_turns):
            said += self._words(self._shape.num_new_tokens)
            # The previous request affects the processor's caches: each of the two goes first equally often.
            fresh_s = self._fresh_s(self._shape.num_new_tokens) if index % 2 else None
            answer = self._ask(said, self._shape.num_output_tokens)
            num_computed = len(said) - answer.num_cached_tokens
            as_long_s = self._fresh_s(num_computed)
            turns.append(
                Turn(
                    num_prompt_tokens=len(said),
                    num_computed_tokens=num_computed,
                    ttft_s=answer.ttft_s,
                    fresh_s=fresh_s or self._fresh_s(self._shape.num_new_tokens),
                    as_long_s=as_long_s,
                )
            )
            said += answer.token_ids
        return turns

    def _fresh_s(self, num_tokens: int) -> float:
        return self._ask(self._words(num_tokens), 1).ttft_s

    def _words(self, count: int) -> list[int]:
        return self._random.choices(self._known_ids, k=count)

    def _ask(self, prompt: Sequence[int], num_output_tokens: int) -> Answer:
        sampling = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
        began_s = self._clock()
        self._engine.add([Request(id=str(next(self._ids)), prompt_token_ids=tuple(prompt), sampling=sampling)])
        deltas: list[TokenDelta] = []
        while not deltas:
            deltas += self._engine.advance()
        ttft_s = self._clock() - began_s
        while not self._engine.is_idle:
            deltas += self._engine.advance()
        return Answer(
            ttft_s=ttft_s,
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            num_cached_tokens=deltas[0].stats.num_cached_tokens,
        )


def table_of(conversations: Sequence[Sequence[Turn]]) -> list[str]:
    """Print a line for each turn, medians of all conversations, and the worst ratio."""
    lines = [f"{'turn':>4} {'prompt':>7} {'computed':>9} {'TTFT ms':>8} {'fresh ms':>9} {'ratio':>6} {'as long':>8}"]
    ratios: list[float] = []
    for number, turns in enumerate(zip(*conversations, strict=True), start=1):
        ratios.append(median(turn.ttft_s / turn.fresh_s for turn in turns))
        as_long = median(turn.ttft_s / turn.as_long_s for turn in turns)
        ttft_s, fresh_s = median(turn.ttft_s for turn in turns), median(turn.fresh_s for turn in turns)
        lines.append(
            f"{number:>4} {turns[0].num_prompt_tokens:>7} {turns[0].num_computed_tokens:>9} {ttft_s * 1e3:>8.1f} "
            f"{fresh_s * 1e3:>9.1f} {ratios[-1]:>6.2f} {as_long:>8.2f}"
        )
    return [*lines, f"worst later turn: {max(ratios[1:]):.2f} (limit {LIMIT})"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=5, help="measured ones (default 5)")
    parser.add_argument("--turns", type=int, default=10, help="of a conversation (default 10)")
    parser.add_argument("--new", type=int, default=96, help="new tokens of a turn (default 96)")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer (default 64)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of torch and the kernels")
    given = parser.parse_args()
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        # As in the worker: it must come before torch.
        limit_spinning()
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", "chat", *sys.argv[1:]])
    torch.set_num_threads(given.threads)
    runner = load_model_runner(ModelOptions(path=model_folder(SHAPE), num_blocks=4096))
    chats = Chats(runner, Shape(num_turns=given.turns, num_new_tokens=given.new, num_output_tokens=given.output))
    print(f"{SHAPE}, {given.new} new and {given.output} answered, load {os.getloadavg()[0]:.1f} before the start")
    conversations = [chats.converse() for _ in range(1 + given.conversations)][1:]
    print("\n".join(table_of(conversations)))


if __name__ == "__main__":
    main()
