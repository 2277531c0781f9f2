"""Whole engines on random weights: ours, transformers' two ways to generate, and requests that other engines quote.

Figures are useful tokens per second: requested tokens over the time from submitting all requests to the last end.
"""

# torch's and transformers' types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from benchmarks.engine.bare import Job, Words
from benchmarks.gpu.folders import MAX_MODEL_LEN, random_folder, shape_of
from benchmarks.gpu.models import random_decoder
from benchmarks.gpu.peers.attention import first_words
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from sluice.engine.config import EngineConfig, StepLimits
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.executor import ModelLimits
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Request, SamplingParams

BLOCK_SIZE = 16
NUM_REQUESTS = 64
"""Concurrent requests against transformers: as many as run at once, in its favour, since its static batch needs no
turns.
"""

MAX_OUTPUT_TOKENS = 256
PEER_LIMIT_S = 40.0
"""Time limit of another engine."""


def nano_jobs(scale: Scale) -> list[Job]:
    """The requests of nano-vllm's benchmark (bench.py), token by token: 133,966 are requested."""
    random, longest, count = Random(0), 8 if scale.is_toy else 1024, 6 if scale.is_toy else 256
    shortest, num_words = min(100, longest // 2), 300 if scale.is_toy else 10_000

    def prompt() -> tuple[int, ...]:
        return tuple(random.randint(0, num_words - int(scale.is_toy)) for _ in range(random.randint(shortest, longest)))

    prompts = [prompt() for _ in range(count)]
    return [Job(prompt, random.randint(shortest, longest)) for prompt in prompts]


def engines(scale: Scale) -> Iterator[Line]:
    """Run ours on all of nano-vllm's requests; then the first of them, shortened, compared with transformers."""
    name, jobs = shape_of(scale), nano_jobs(scale)
    some = [
        replace(job, num_output_tokens=min(job.num_output_tokens, MAX_OUTPUT_TOKENS)) for job in jobs[:NUM_REQUESTS]
    ]
    with random_folder(scale) as folder:
        runner = load_runner(scale, folder, max_num_seqs=len(jobs))
        yield _line_of_ours(runner, jobs, f"nano-vllm's requests, {name}, {len(jobs)} sequences")
        ours_s = warm_s(runner, some)
        del runner
        empty_device(scale)
        for peer, run in (("generate_batch", run_generate_batch), ("generate", run_generate)):
            yield _compared(scale, folder, some, ours_s, (f"{peer}, {name}, {len(some)} requests", run))
            empty_device(scale)


def empty_device(scale: Scale) -> None:
    """Release unreferenced memory."""
    gc.collect()
    if scale.device.type == "cuda":
        torch.cuda.empty_cache()


# Ours


def load_runner(scale: Scale, folder: Path, *, max_num_seqs: int) -> ModelRunner:
    """Return our engine's executor for a folder."""
    return load_model_runner(options_of(scale, folder, max_num_seqs=max_num_seqs))


def options_of(scale: Scale, folder: Path, *, max_num_seqs: int) -> ModelOptions:
    """Return blocks for as many sequences as may run, of 1,280 tokens each on average."""
    return ModelOptions(
        path=folder,
        device="cuda:0" if scale.device.type == "cuda" else "cpu",
        block_size=BLOCK_SIZE,
        num_blocks=max_num_seqs * (64 if scale.is_toy else 1280) // BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=StepLimits.of(scale.device.type).max_num_batched_tokens,
        max_model_len=64 if scale.is_toy else MAX_MODEL_LEN,
    )


def random_runner(scale: Scale, shape: str, *, max_num_seqs: int) -> ModelRunner:
    """Return our engine's executor for a shape, with weights created on the device."""
    options = options_of(scale, Path(), max_num_seqs=max_num_seqs)
    max_model_len, num_blocks = options.max_model_len or 0, options.num_blocks or 0
    decoder = random_decoder(
        shape, scale.device, max_model_len=max_model_len, max_tokens=options.max_num_batched_tokens
    )
    limits = ModelLimits(
        max_model_len=max_model_len,
        vocab_size=decoder.config.vocab_size,
        eos_token_ids=frozenset(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )
    runner = ModelRunner(decoder, options, limits, fingerprint="")
    runner.prepare_first()
    return runner


def warm_s(runner: ModelRunner, jobs: Sequence[Job], **options: float) -> float:
    """Return seconds for all jobs, the better of two runs, after a warm-up that records its steps."""
    warm_up(runner, jobs, **options)
    times: list[float] = []
    for _ in range(2):
        began_s = time.perf_counter()
        run_ours(runner, jobs, **options)
        times.append(time.perf_counter() - began_s)
    return min(times)


def warm_up(runner: ModelRunner, jobs: Sequence[Job], **options: float) -> None:
    """Run all jobs once, and record the steps that they wanted."""
    run_ours(runner, jobs, **options)
    while runner.has_preparations:
        runner.prepare()


def run_ours(runner: ModelRunner, jobs: Sequence[Job], *, max_num_seqs: float = 0, temperature: float = 0.6) -> None:
    """Generate all jobs, without a prefix cache, so that everything is computed.

    Args:
        runner: the executor.
        jobs: all are submitted at the start.
        max_num_seqs: how many run at once. 0: all.
        temperature: that of nano-vllm's benchmark if not given.

    Raises:
        RuntimeError: the engine returned fewer tokens, or more.
    """
    device = runner.decoder.weights.embedding.device.type
    config = EngineConfig(
        max_num_seqs=int(max_num_seqs) or len(jobs),
        max_num_batched_tokens=StepLimits.of(device).max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    engine = LLMEngine(runner, Words(runner.limits.vocab_size), config)
    engine.add(
        Request(
            id=str(n),
            prompt_token_ids=job.prompt,
            sampling=SamplingParams(temperature=temperature, seed=n, max_tokens=job.num_output_tokens, ignore_eos=True),
        )
        for n, job in enumerate(jobs)
    )
    num_tokens = 0
    while not engine.is_idle:
        num_tokens += sum(len(delta.token_ids) for delta in engine.advance())
    if num_tokens != num_wanted(jobs):
        raise RuntimeError(f"{num_tokens} tokens came of {num_wanted(jobs)}")


def num_wanted(jobs: Sequence[Job]) -> int:
    """Return the number of output tokens of all jobs."""
    return sum(job.num_output_tokens for job in jobs)


def _line_of_ours(runner: ModelRunner, jobs: Sequence[Job], name: str) -> Line:
    seconds = warm_s(runner, jobs)
    figures: dict[str, float | str] = {
        "tokens/s": num_wanted(jobs) / seconds,
        "s": seconds,
        "output tokens": num_wanted(jobs),
        "prompt tokens": sum(len(job.prompt) for job in jobs),
    }
    return Line(name, figures)


# transformers


class Result(Protocol):
    """Result of transformers' continuous batching for a request."""

    generated_tokens: list[int]

    def is_finished(self) -> bool:
        """Whether the request has ended."""
        ...


class Manager(Protocol):
    """transformers' continuous batching."""

    def add_request(self, input_ids: list[int], *, max_new_tokens: int) -> object:
        """Add a request."""
        ...

    def get_result(self, *, timeout: float) -> Result | None:
        """Return its next result, of any request."""
        ...


class Model(Protocol):
    """The used part of a transformers model."""

    device: torch.device

    def generate(self, ids: Tensor, **options: object) -> Tensor:
        """Generate: `[S, T]` to `[S, T + new tokens]`."""
        ...

    def continuous_batching_context_manager(self, **options: object) -> AbstractContextManager[Manager]:
        """Start its continuous batching for the duration of the context."""
        ...


class Done(NamedTuple):
    """Completed work of an engine."""

    num_tokens: int
    seconds: float


def _compared(
    scale: Scale,
    folder: Path,
    jobs: Sequence[Job],
    ours_s: float,
    peer: tuple[str, Callable[[Model, Sequence[Job]], Done]],
) -> Line:
    """Compare tokens per second. A peer that is missing, fails or takes too long is reported, and never wrong."""
    from transformers import AutoModelForCausalLM

    name, run = peer
    ours = num_wanted(jobs) / ours_s
    try:
        # Other threads use it, which are not in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=scale.dtype, attn_implementation="sdpa")
            done = run(cast("Model", torch.nn.Module.to(model, scale.device)), jobs)
    except Exception as error:  # noqa: BLE001 - any error of a peer becomes a line, and ours continue
        return Line(f"engine compared with {name}", {"tokens/s": ours, "note": f"cannot: {first_words(error)}"})
    theirs = done.num_tokens / done.seconds
    figures: dict[str, float | str] = {"tokens/s": ours, "theirs": theirs, "times theirs": ours / theirs}
    if done.num_tokens < num_wanted(jobs):
        figures["note"] = f"theirs was cut after {done.seconds:.0f} s: {done.num_tokens} of {num_wanted(jobs)} tokens"
    return Line(f"engine compared with {name}", figures)


def run_generate(model: Model, jobs: Sequence[Job]) -> Done:
    """Run one static batch, padded on the left, to the longest output; tokens beyond a job's output do not count."""
    _generate(model, jobs[:2], 2)
    began_s = time.perf_counter()
    num_steps = _generate(model, jobs, max(job.num_output_tokens for job in jobs))
    num_useful = sum(min(job.num_output_tokens, num_steps) for job in jobs)
    return Done(num_useful, time.perf_counter() - began_s)


def _generate(model: Model, jobs: Sequence[Job], num_steps: int) -> int:
    """Number of steps."""
    longest = max(len(job.prompt) for job in jobs)
    padding = [longest - len(job.prompt) for job in jobs]
    ids = torch.tensor([[0] * pad + list(job.prompt) for pad, job in zip(padding, jobs, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    made = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=num_steps,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        max_time=PEER_LIMIT_S,
    )
    return made.cpu().shape[1] - longest


def run_generate_batch(model: Model, jobs: Sequence[Job]) -> Done:
    """transformers' continuous batching, on a GPU with the sizes that it chooses itself."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

    batching = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64) if model.device.type == "cpu" else None
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
    ) as manager:
        _collect(manager, [replace(job, num_output_tokens=4) for job in jobs[:2]])
        began_s = time.perf_counter()
        num_tokens = _collect(manager, jobs)
        return Done(num_tokens, time.perf_counter() - began_s)


def _collect(manager: Manager, jobs: Sequence[Job]) -> int:
    """Generate jobs; return the tokens of those that ended in time.

    Raises:
        RuntimeError: none did.
    """
    until_s = time.monotonic() + PEER_LIMIT_S
    for job in jobs:
        manager.add_request(list(job.prompt), max_new_tokens=job.num_output_tokens)
    num_tokens, num_done = 0, 0
    while num_done < len(jobs) and time.monotonic() < until_s:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            num_done += 1
            num_tokens += len(result.generated_tokens)
    if num_tokens == 0:
        raise RuntimeError(f"no request ended within {PEER_LIMIT_S:g} s")
    return num_tokens
