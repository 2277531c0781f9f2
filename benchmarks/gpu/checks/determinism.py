"""A deterministic engine is bitwise identical for any batch composition: part of section "parity" of `benchmarks gpu`.

In bfloat16, where another order of a sum soon changes a token. Tokens and log-probabilities of each request, alone and
whole, are compared with those among others, in chunks, under preemption and from the prefix cache.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.checks.sameness import BLOCK_SIZE, make_requests
from benchmarks.gpu.models import save_small_model, triton_in_place_of_cpu
from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from sluice.engine.config import EngineConfig
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullTokenizer
from sluice.engine.request import Request

Outputs = Mapping[tuple[str, int], Sequence[tuple[int, object]]]
"""By request and choice: its tokens, each with its log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """What runs beside a request."""

    name: str
    num_at_once: int
    max_num_batched_tokens: int
    num_blocks: int
    has_prefix_cache: bool = False


MAX_MODEL_LEN = 160
ALONE = Company(name="alone", num_at_once=1, max_num_batched_tokens=64, num_blocks=400)
COMPANIES = (
    Company(name="among others", num_at_once=7, max_num_batched_tokens=64, num_blocks=400),
    Company(name="in short chunks", num_at_once=4, max_num_batched_tokens=9, num_blocks=400),
    Company(
        name="under preemption",
        num_at_once=5,
        max_num_batched_tokens=24,
        num_blocks=-(-MAX_MODEL_LEN // BLOCK_SIZE) + 2,
    ),
    Company(
        name="from the prefix cache", num_at_once=2, max_num_batched_tokens=64, num_blocks=400, has_prefix_cache=True
    ),
)


def same_bits(scale: Scale) -> Groups:
    """Return the comparison; without a GPU interpreted, in float32, of few requests."""
    return {"same bits": lambda: _lines(scale)}


def _lines(scale: Scale) -> Iterator[Line]:
    with ExitStack() as stack:
        if scale.is_toy:
            from tests.kernels_triton.invariant.matrix_unit import matrix_unit

            stack.enter_context(triton_in_place_of_cpu(deterministic=True))
            stack.enter_context(matrix_unit())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_small_model("qwen3", folder)
        asked = with_logprobs(make_requests(2, max_tokens=1) if scale.is_toy else make_requests(24, max_tokens=60))
        expected = outputs(runner_for(scale, folder, ALONE), asked, ALONE)
        for company in COMPANIES[:1] if scale.is_toy else COMPANIES:
            found = outputs(runner_for(scale, folder, company), asked, company)
            equal = sum(found[key] == expected[key] for key in expected)
            figures: dict[str, float | str] = {"sequences": len(expected), "equal": equal}
            yield Line(f"same bits, deterministic: {company.name}", figures, equal == len(expected))


def with_logprobs(asked: Sequence[Request]) -> list[Request]:
    """Return the requests, each with the log-probabilities of its tokens and of three alternatives."""
    return [replace(request, sampling=replace(request.sampling, logprobs=3)) for request in asked]


def runner_for(scale: Scale, folder: Path, company: Company) -> ModelRunner:
    """Load the model as a deterministic worker does."""
    return load_model_runner(
        ModelOptions(
            path=folder,
            device=str(scale.device),
            dtype="float32" if scale.is_toy else "bfloat16",
            # Interpreted kernels are put in the place of the CPU's, which are not asked.
            is_deterministic=not scale.is_toy,
            block_size=BLOCK_SIZE,
            num_blocks=company.num_blocks,
            num_threads=1 if scale.is_toy else None,
            max_num_seqs=company.num_at_once,
            max_num_batched_tokens=company.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            graphs=False if scale.is_toy else None,
            lag=0,
        )
    )


def outputs(runner: ModelRunner, asked: Sequence[Request], company: Company) -> Outputs:
    """Run requests to their ends."""
    config = EngineConfig(
        max_num_seqs=company.num_at_once,
        max_num_batched_tokens=company.max_num_batched_tokens,
        enable_prefix_caching=company.has_prefix_cache,
    )
    engine = LLMEngine(runner, NullTokenizer(), config)
    engine.add(asked)
    found = {
        (request.id, choice): list[tuple[int, object]]() for request in asked for choice in range(request.num_choices)
    }
    while not engine.is_idle:
        for delta in engine.advance():
            found[delta.request_id, delta.choice] += zip(delta.token_ids, delta.logprobs or (), strict=True)
    return found
