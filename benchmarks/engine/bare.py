"""The bare engine on this CPU: the requests of all comparisons, a run over them, and its bound."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TYPE_CHECKING

import torch

from benchmarks.engine.models import VOCAB_SIZE
from sluice.engine.batch import Batch
from sluice.engine.config import EngineConfig
from sluice.engine.execution.threads import limit_spinning
from sluice.engine.executor import Executor, Launched
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Request, Sampling
from sluice.engine.text.detokenizer import ByteDetokenizer
from sluice.kernels.decoder_step import LayerWeights
from sluice.kernels.experts import Dense

if TYPE_CHECKING:
    from sluice.engine.execution.model_runner import ModelRunner

MAX_NUM_BATCHED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt, and its number of output tokens."""

    prompt: tuple[int, ...]
    num_output_tokens: int


def make_jobs() -> list[Job]:
    """Return 48 jobs of 16 to 384 prompt tokens and 8 to 192 output tokens, always the same."""
    random = Random(0)

    def job(num_prompt_tokens: int, num_output_tokens: int) -> Job:
        return Job(tuple(random.randrange(3, VOCAB_SIZE) for _ in range(num_prompt_tokens)), num_output_tokens)

    return [job(random.randint(16, 284), random.randint(8, 137)) for _ in range(46)] + [job(384, 192), job(16, 8)]


def jobs_of(max_num_seqs: int) -> list[Job]:
    """Return the requests of a case: with one sequence at once, a single one of 128 + 128 tokens."""
    jobs = make_jobs()
    return jobs if max_num_seqs > 1 else [Job(jobs[-2].prompt[:128], 128)]


def num_wanted(jobs: Sequence[Job]) -> int:
    """Return the number of output tokens of all jobs."""
    return sum(job.num_output_tokens for job in jobs)


@cache
def _pieces(vocab_size: int) -> dict[int, str | bytes]:
    # Created once: a run is timed with its `Words`.
    return {token_id: f" {token_id}" for token_id in range(vocab_size)}


class Words:
    """A decoder for a model without a tokenizer: every token is a word."""

    def __init__(self, vocab_size: int) -> None:
        self._pieces = _pieces(vocab_size)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens."""
        return "".join(f" {token_id}" for token_id in token_ids)

    def stream(self, *, skip_special_tokens: bool, after: Sequence[int] = ()) -> ByteDetokenizer:
        """Begin the text of a choice."""
        return ByteDetokenizer(self._pieces)


def run_jobs(executor: Executor, jobs: Sequence[Job], config: EngineConfig, *, temperature: float = 0.0) -> None:
    """Generate all jobs, submitted at once, with a new engine.

    Raises:
        RuntimeError: the engine returned fewer tokens, or more.
    """
    engine = LLMEngine(executor, Words(executor.limits.vocab_size), config)
    engine.add(
        Request(
            id=str(number),
            prompt_token_ids=job.prompt,
            sampling=Sampling(temperature=temperature, seed=number, max_tokens=job.num_output_tokens, ignore_eos=True),
        )
        for number, job in enumerate(jobs)
    )
    num_tokens = 0
    while not engine.is_idle:
        num_tokens += sum(len(delta.token_ids) for delta in engine.advance())
    if num_tokens != num_wanted(jobs):
        raise RuntimeError(f"{num_tokens} tokens came of {num_wanted(jobs)}")


def config_of(max_num_seqs: int, max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS) -> EngineConfig:
    """Return settings without a prefix cache, so that everything is computed."""
    return EngineConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=False
    )


class RecordingRunner:
    """A model runner that records the size of each step, (tokens, rows that sample)."""

    def __init__(self, runner: "ModelRunner") -> None:
        self.runner = runner
        self.steps: list[tuple[int, int]] = []
        self.limits = runner.limits
        self.fingerprint = runner.fingerprint
        self.lag = runner.lag

    def launch(self, batch: Batch) -> Launched:
        """Start the step, and record it."""
        self.steps.append((batch.num_tokens, sum(row.samples for row in batch.rows)))
        return self.runner.launch(batch)


def run_recorded(runner: RecordingRunner, jobs: Sequence[Job], max_num_seqs: int) -> None:
    """Generate all jobs; what is recorded afterwards are the steps of this run."""
    runner.steps.clear()
    run_jobs(runner, jobs, config_of(max_num_seqs))


def dense_of(layer: LayerWeights) -> Dense:
    """Return the feed-forward of a layer of a model without experts."""
    assert isinstance(layer.feed_forward, Dense)
    return layer.feed_forward


@torch.inference_mode()
def run_products(runner: RecordingRunner) -> None:
    """Repeat only the matrix products of the recorded steps."""
    weights = runner.runner.decoder.weights
    config = runner.runner.decoder.config
    hidden = torch.zeros(MAX_NUM_BATCHED_TOKENS, config.hidden_size, dtype=torch.bfloat16)
    attended = torch.zeros(MAX_NUM_BATCHED_TOKENS, config.num_heads * config.head_size, dtype=torch.bfloat16)
    inner = torch.zeros(MAX_NUM_BATCHED_TOKENS, config.intermediate_size, dtype=torch.bfloat16)
    for num_tokens, num_rows in runner.steps:
        for index, layer in enumerate(weights.layers):
            layer.qkv(hidden[:num_tokens])
            num_left = num_rows if index == len(weights.layers) - 1 else num_tokens
            layer.attention_output(attended[:num_left])
            dense = dense_of(layer)
            dense.gated(hidden[:num_left])
            dense.down(inner[:num_left])
        weights.output(hidden[:num_rows])


def timed_s(run: Callable[[], object]) -> float:
    """Return seconds of a run."""
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def best_of_two_s(run: Callable[[], object]) -> float:
    """Return seconds of the faster of two runs."""
    return min(timed_s(run) for _ in range(2))


def wait_as_a_worker(benchmark: str) -> None:
    """Start `python -m benchmarks BENCHMARK` again with the worker's wait policy, unless one is set."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        # It must come before torch.
        limit_spinning()
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", benchmark, *sys.argv[1:]])
