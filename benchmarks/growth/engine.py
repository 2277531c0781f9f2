"""Growth curves of the engine: step time outside the model, and attention time, with batch and context."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.engine.scheduler import measure
from benchmarks.growth.curves import Curve
from sluice.engine.config import EngineConfig
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import Request, SamplingParams
from sluice.kernels.paged_attention import allocate_kv_cache, paged_attention

NUM_STEPS = 200
NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 12, 4, 64, 16


def by_running(sizes: Sequence[int]) -> list[Curve]:
    """Measure a step of the plain Python (scheduler, output, text) per running sequence."""
    points = [(size, 1e3 * measure(size, num_windows=20).median_ms / size) for size in sizes]
    name = "a step without the model"
    return [Curve(name=name, size="sequences running", cost="µs a sequence", expected=0.0, points=points)]


def by_context(sizes: Sequence[int]) -> list[Curve]:
    """Measure a step of one sequence with growing context: outside the model, and in attention alone."""
    step = [(size, _step_us(size)) for size in sizes]
    num_threads = torch.get_num_threads()
    # With two threads, one waits for the other's core as soon as another process runs.
    torch.set_num_threads(1)
    attention = [(size, _attention_us(size)) for size in sizes]
    torch.set_num_threads(num_threads)
    size_name = "tokens of context"
    return [
        Curve(name="a step without the model", size=size_name, cost="µs a step", expected=0.0, points=step),
        Curve(name="attention, one layer", size=size_name, cost="µs, one thread", expected=1.0, points=attention),
    ]


def _step_us(num_tokens: int) -> float:
    limits = NullModelConfig(max_model_len=num_tokens + 4096, num_blocks=num_tokens // BLOCK_SIZE + 1024)
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=num_tokens + 1)
    engine = LLMEngine(NullModel(limits), NullTokenizer(), config)
    prompt = tuple(k * 7 % 256 for k in range(num_tokens))
    engine.add([Request(id="one", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=4000, seed=1))])
    for _ in range(10):
        engine.advance()
    return _median_us(engine.advance, NUM_STEPS)


def _attention_us(num_tokens: int) -> float:
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    cache = allocate_kv_cache(
        num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    query = torch.randn(1, NUM_QUERY_HEADS, HEAD_SIZE).to(torch.bfloat16)
    tables = torch.randperm(num_blocks).to(torch.int32)[None]
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([num_tokens], dtype=torch.int32)

    def attend() -> None:
        paged_attention(
            query, cache, tables, starts, lens, scale=HEAD_SIZE**-0.5, max_query_len=1, max_context_len=num_tokens
        )

    attend()
    return _median_us(attend, 30)


def _median_us(work: Callable[[], object], rounds: int) -> float:
    took: list[float] = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        work()
        took.append(time.perf_counter() - began_s)
    return 1e6 * statistics.median(took)
