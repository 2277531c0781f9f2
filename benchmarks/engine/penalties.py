"""What penalties cost: time of a step's sampling by how many rows have them, and the rate of a row on a lagging device.

    python -m benchmarks penalties

Greedy rows of random logits in float32; those with penalties have seen so many tokens. Prints the median in processor
time of one thread, which other load affects little. The rate is that of the engine's plan, by the null model: tokens of
a row for each step of a device that is a step behind (`Executor.lag` 1).
"""

import argparse
import statistics
import time
from dataclasses import replace

import torch

from sluice.engine.config import EngineConfig
from sluice.engine.execution.sampling.sampler import Sampler
from sluice.engine.execution.slots import Slot
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import Request, SamplingParams

PLAIN = SamplingParams(temperature=0, max_tokens=10**6)
PENALISED = replace(PLAIN, repetition_penalty=1.1, frequency_penalty=0.5)
_WARM_STEPS = 3


def sampling_ms(num_rows: int, num_penalised: int, *, vocab_size: int, num_seen: int, num_steps: int) -> float:
    """Return the median milliseconds in which one step's rows are prepared and drawn, by one thread."""
    sampler = Sampler(
        vocab_size=vocab_size,
        eos_token_ids=frozenset(),
        max_rows=num_rows,
        max_sequences=num_rows,
        device=torch.device("cpu"),
    )
    slots = [_slot(row, PENALISED if row < num_penalised else PLAIN, num_seen) for row in range(num_rows)]
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    times: list[float] = []
    for step in range(_WARM_STEPS + num_steps):
        begin = time.thread_time()
        drawn = sampler.sample(logits, sampler.prepare(slots, [step] * num_rows)).collect()
        times.append(time.thread_time() - begin)
        for slot, result in zip(slots, drawn, strict=True):
            slot.token_ids += result.token_ids
    return statistics.median(times[_WARM_STEPS:]) * 1000


def _slot(index: int, params: SamplingParams, num_seen: int) -> Slot:
    return Slot(
        index=index,
        sequence_id=index,
        choice=0,
        sampling=params,
        num_prompt_tokens=num_seen,
        token_ids=[(7 * index + 31 * token) % 1000 for token in range(num_seen)],
        num_blocks=0,
    )


class _LaggingModel(NullModel):
    lag = 1


def tokens_per_step(params: SamplingParams, num_steps: int = 200) -> float:
    """Return the tokens that a row gets in each step of a device that lags."""
    model = _LaggingModel(NullModelConfig(mean_output_tokens=10**6))
    engine = LLMEngine(model, NullTokenizer(), EngineConfig())
    sampling = replace(params, max_tokens=2 * num_steps, ignore_eos=True)
    engine.add([Request(id="r", prompt_token_ids=(1,) * 8, sampling=sampling)])
    num_tokens = sum(len(delta.token_ids) for _ in range(num_steps) for delta in engine.advance())
    return num_tokens / num_steps


def main() -> int:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--seen", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for num_penalised in (0, 1, args.rows):
        ms = sampling_ms(args.rows, num_penalised, vocab_size=args.vocab, num_seen=args.seen, num_steps=args.steps)
        print(f"{args.rows} rows, V = {args.vocab}, {num_penalised:3} with penalties: {ms:6.2f} ms a step")
    for name, params in (("without", PLAIN), ("with", PENALISED)):
        print(f"a row {name} penalties, lag 1: {tokens_per_step(params):.2f} tokens a step")
    return 0
