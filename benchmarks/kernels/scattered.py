"""Attention on this CPU over scattered block tables, compared with contiguous ones: what compaction could gain.

    python -m benchmarks scattered [--dtype float32|bfloat16] [--threads N]

Decodes with the heads of the 100 M Llama of `benchmarks.engine.models`, over one layer's cache of 8,192 blocks of 16
tokens. Three block tables for the same contexts: each sequence's blocks in one run; as the engine left them, after 400
requests of 50 to 700 prompt and 50 to 600 output tokens with the prefix cache; and dealt at random. They are called in
turn. Medians in microseconds, and ratios to the first. `--dtype bfloat16` needs a processor with AVX512_BF16 or AMX.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import argparse
import os
import time
from random import Random
from statistics import median

import torch
from torch import Tensor

from sluice.engine.batch import Batch
from sluice.engine.config import EngineConfig
from sluice.engine.execution.slots import Slots
from sluice.engine.executor import Computed
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import Request, SamplingParams
from sluice.kernels.paged_attention import KVCache, allocate_kv_cache, paged_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 12, 4, 64
NUM_BLOCKS, BLOCK_SIZE = 8192, 16
MAX_MODEL_LEN = 2048
NUM_REQUESTS = 400

_REPEATS = 201


class _KeepsTables(NullModel):
    """A null model that keeps the block tables which a real executor would have."""

    def __init__(self, num_running: int) -> None:
        super().__init__(NullModelConfig(max_model_len=MAX_MODEL_LEN, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))
        self.slots = Slots(2 * num_running, MAX_MODEL_LEN // BLOCK_SIZE)
        self.last = Batch(())

    def launch(self, batch: Batch) -> Computed:
        """See `Executor.launch`."""
        self.slots.write(batch)
        self.last = batch
        return super().launch(batch)


def tables_left(num_running: int) -> tuple[Tensor, Tensor]:
    """Return block tables `[S, blocks]` and contexts `[S]` of an engine that has run for a while."""
    model, random = _KeepsTables(num_running), Random(0)
    engine = LLMEngine(model, NullTokenizer(), EngineConfig(max_num_seqs=num_running, max_num_batched_tokens=2048))
    num_ended = number = 0
    while num_ended < NUM_REQUESTS or len(model.last.rows) < num_running:
        while engine.stats.num_running + engine.stats.num_waiting < num_running:
            number += 1
            prompt = tuple(random.randbytes(random.randint(50, 700)))
            sampling = SamplingParams(max_tokens=random.randint(50, 600), seed=number)
            engine.add([Request(id=str(number), prompt_token_ids=prompt, sampling=sampling)])
        num_ended += sum(delta.finish is not None for delta in engine.advance())
    rows = model.last.rows
    tables = torch.from_numpy(model.slots.tables[[row.slot for row in rows]])
    return tables, torch.tensor([row.start + row.num_tokens for row in rows], dtype=torch.int32)


def dealt(order: Tensor, context_lens: Tensor) -> Tensor:
    """Return block tables that take their blocks from `order`, one sequence after another."""
    blocks_each = [-(-length // BLOCK_SIZE) for length in context_lens.tolist()]
    parts = order[: sum(blocks_each)].to(torch.int32).split(blocks_each)
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def measure(cache: KVCache, context_lens: Tensor, tables: list[Tensor]) -> list[float]:
    """Return microseconds of a decode over each of `tables`."""
    num_sequences = len(context_lens)
    query = torch.randn(num_sequences, NUM_HEADS, HEAD_SIZE).to(cache.keys.dtype)
    out = torch.empty_like(query)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32)
    times: list[list[float]] = [[] for _ in tables]
    for repeat in range(_REPEATS):
        # Each of them goes first equally often: they share the processor's caches.
        for kind in range(repeat, repeat + len(tables)):
            began_s = time.perf_counter()
            paged_attention(
                query,
                cache,
                tables[kind % len(tables)],
                starts,
                context_lens,
                scale=HEAD_SIZE**-0.5,
                max_query_len=1,
                max_context_len=int(context_lens.max()),
                out=out,
            )
            times[kind % len(tables)].append((time.perf_counter() - began_s) * 1e6)
    # The first ones warm up.
    return [median(one[3:]) for one in times]


def main() -> None:
    """Print a line for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of keys and values")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of torch and the kernels")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dtype = torch.float32 if given.dtype == "float32" else torch.bfloat16
    cache = allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, dtype=dtype, device=torch.device("cpu"))
    # Unwritten memory is one shared page of zeros.
    cache.keys.normal_()
    cache.values.normal_()
    print(f"{given.dtype}, {given.threads} threads, load {os.getloadavg()[0]:.1f} before the start")
    print(f"{'sequences':>9} {'tokens':>7} {'contiguous us':>14} {'as left us':>11} {'random us':>10} {'ratios':>14}")
    shuffled = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0))
    for num_running in (1, 16, 64):
        left, context_lens = tables_left(num_running)
        tables = [dealt(torch.arange(NUM_BLOCKS), context_lens), left, dealt(shuffled, context_lens)]
        first_us, left_us, random_us = measure(cache, context_lens, tables)
        print(
            f"{num_running:>9} {int(context_lens.sum()):>7} {first_us:>14.0f} {left_us:>11.0f} {random_us:>10.0f} "
            f"{left_us / first_us:>7.3f}{random_us / first_us:>7.3f}"
        )


if __name__ == "__main__":
    main()
