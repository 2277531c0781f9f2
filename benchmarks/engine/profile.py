"""Time of each operation of a step, compared with its lower bound: section "profile" of `benchmarks engine`.

The random model `llama-100m` in four cases: decodes of 1, 16 and 48 sequences with `--context` tokens each, and a
prefill of 512. Medians of several steps, in microseconds, with shares of the whole step:

- phases of the native step, as seen by its first thread: each ends when the last thread finishes;
- work outside it: batch layout, sampling, and the rest of Python and ctypes;
- the scheduler's and the detokenizer's part, over the null model, for as many sequences.

The bound of a product is the slower of reading its weights once at the bandwidth measured here and of the best rate at
which this kernel multiplied many rows here; for attention, the same of its keys and values. Other phases have no bound.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from statistics import median

import torch

from benchmarks.engine.bare import dense_of, timed_s
from benchmarks.engine.models import VOCAB_SIZE, model_folder
from benchmarks.engine.scheduler import measure
from sluice.engine.batch import Batch
from sluice.engine.config import Quantization
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.request import Sampling
from sluice.engine.sequence import Sequence, batch_of
from sluice.kernels.decoder_step import DecoderWeights, StepInputs
from sluice.kernels.linear import Linear
from sluice.kernels.linear.native import NativeLinear

BLOCK_SIZE = 16
REPEATS = 15
PREFILL = 512


@dataclass(frozen=True, slots=True)
class Roof:
    """Best measured rates of this machine."""

    bytes_per_s: float
    multiplications_per_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step: number of sequences, new tokens each, and context."""

    name: str
    num_sequences: int
    num_new: int
    context: int

    def batch(self) -> Batch:
        """Return its sequences, in separate blocks."""
        random, blocks_each = Random(0), -(-self.context // BLOCK_SIZE)
        sequences = [
            Sequence(
                id=i,
                request_id=str(i),
                choice=0,
                sampling=Sampling(temperature=0),
                token_ids=[random.randrange(3, VOCAB_SIZE) for _ in range(self.context)],
                num_prompt_tokens=self.context,
                tables=[list(range(i * blocks_each, (i + 1) * blocks_each))],
            )
            for i in range(self.num_sequences)
        ]
        start = self.context - self.num_new
        return batch_of((sequence, start, self.num_new, True) for sequence in sequences)


def compute_contexts(runner: ModelRunner, batch: Batch) -> None:
    """Write the keys and values that `batch` reads: unwritten memory is one shared page of zeros."""
    for row in batch.rows:
        if row.start:
            context = row._replace(start=0, num_tokens=row.start, samples=False)
            runner.launch(replace(batch, rows=(context,))).collect()


def median_s(call: Callable[[], object]) -> float:
    """Return median seconds of a call, after a warm-up."""
    call()
    return median(timed_s(call) for _ in range(REPEATS))


def _best_s(call: Callable[[], object]) -> float:
    return min(timed_s(call) for _ in range(REPEATS))


def measure_roof(weights: DecoderWeights) -> Roof:
    """Measure the bandwidth of reading all weights, and the rate of a product of 512 rows: the best of several."""
    products = _products(weights)
    num_bytes = sum(product.num_bytes for product in products)
    layer = dense_of(weights.layers[0]).gated
    assert isinstance(layer, NativeLinear)
    # Zeros multiply faster than other numbers.
    rows = {size: torch.randn(PREFILL, size).to(torch.bfloat16) for size in {p.in_size for p in products}}
    one_row_s = _best_s(lambda: [product(rows[product.in_size][:1]) for product in products])
    many_s = _best_s(lambda: layer(rows[layer.in_size]))
    return Roof(num_bytes / one_row_s, PREFILL * layer.num_weights / many_s)


def bounds_us(runner: ModelRunner, case: Case, roof: Roof) -> dict[str, float]:
    """Return the lower bound of each phase."""
    decoder = runner.decoder
    weights, config = decoder.weights, decoder.config
    num_tokens, layers = case.num_sequences * case.num_new, weights.layers

    def product_us(product: Linear, num_rows: int) -> float:
        assert isinstance(product, NativeLinear)
        reading, multiplying = product.num_bytes / roof.bytes_per_s, product.num_weights * num_rows
        return 1e6 * max(reading, multiplying / roof.multiplications_per_s)

    # The last layer continues only with the tokens whose logits are needed.
    rows = [num_tokens] * (len(layers) - 1) + [case.num_sequences]
    kv_bytes = case.num_sequences * case.context * config.num_kv_heads * config.head_size * 2 * 2 * len(layers)
    pairs = zip(layers, rows, strict=True)
    by_name = {"qkv": 0.0, "attention_output": 0.0, "gated": 0.0, "down": 0.0}
    for layer, num_rows in pairs:
        by_name["qkv"] += product_us(layer.qkv, num_tokens)
        by_name["attention_output"] += product_us(layer.attention_output, num_rows)
        by_name["gated"] += product_us(dense_of(layer).gated, num_rows)
        by_name["down"] += product_us(dense_of(layer).down, num_rows)
    output_us = product_us(weights.output, case.num_sequences)
    seen = case.num_sequences * case.num_new * (case.context - (case.num_new - 1) / 2)  # pairs of tokens
    scored = 2 * seen * config.num_heads * config.head_size * len(layers)
    attention_s = max(kv_bytes / roof.bytes_per_s, scored / roof.multiplications_per_s)
    return by_name | {"output": output_us, "attention": 1e6 * attention_s}


def phases_us(runner: ModelRunner, tensors: StepInputs) -> dict[str, float]:
    """Return the phases of the run with the median total."""
    runs = sorted((runner.time_phases(tensors) for _ in range(REPEATS)), key=lambda run: sum(run.values()))
    return {name: 1e6 * seconds for name, seconds in runs[len(runs) // 2].items()}


def print_case(runner: ModelRunner, case: Case, roof: Roof) -> None:
    """Print the table of one case."""
    batch = case.batch()
    compute_contexts(runner, batch)
    whole_us = 1e6 * median_s(lambda: runner.launch(batch).collect())
    layout_us = 1e6 * median_s(lambda: runner.lay_out(batch))
    with torch.inference_mode():
        tensors = runner.lay_out(batch)
        forward_us = 1e6 * median_s(lambda: runner.forward(tensors))
        phases = phases_us(runner, tensors)
    inside_us, bounds = sum(phases.values()), bounds_us(runner, case, roof)
    print(f"\n{case.name}: {whole_us:,.0f} us a step")
    lines = phases | {
        "call of the native step": max(0.0, forward_us - inside_us),
        "batch layout": layout_us,
        "sampling, and the rest of Python": max(0.0, whole_us - forward_us - layout_us),
    }
    for name, us in sorted(lines.items(), key=lambda line: -line[1]):
        bound = f"{bounds[name]:>9,.0f} us at best ({us / bounds[name]:.2f}x)" if name in bounds else ""
        print(f"  {name:<34} {us:>9,.0f} us {us / whole_us:>6.1%} {bound}")
    bound_us = sum(bounds.values())
    print(f"  {'products and keys and values alone':<34} {bound_us:>9,.0f} us; the step is {whole_us / bound_us:.2f}x")
    if case.num_new == 1:
        cost = measure(case.num_sequences, num_windows=5)
        print(f"  {'scheduler and detokenizer, besides':<34} {1e3 * cost.median_ms:>9,.0f} us")


def _products(weights: DecoderWeights) -> list[NativeLinear]:
    linears = [
        linear for layer in weights.layers for linear in (layer.qkv, layer.attention_output, *dense_of(layer).products)
    ]
    return [linear for linear in (*linears, weights.output) if isinstance(linear, NativeLinear)]


def print_profile(quantization: Quantization, context: int) -> None:
    """Print a table for each case."""
    runner = load_model_runner(ModelOptions(path=model_folder(), num_blocks=2048, quantization=quantization))
    if not runner.decoder.has_native_step:
        print("\nno profile: this machine multiplies no bfloat16, or has no C compiler, so it has no native step")
        return
    with torch.inference_mode():
        roof = measure_roof(runner.decoder.weights)
    rate = 2e-12 * roof.multiplications_per_s
    print(
        f"\nweights are read at {roof.bytes_per_s / 1e9:.1f} GB/s; {PREFILL} rows are multiplied at {rate:.2f} TFLOP/s"
    )
    for num_sequences in (1, 16, 48):
        print_case(runner, Case(f"{num_sequences} decodes", num_sequences, 1, context), roof)
    print_case(runner, Case(f"a prefill of {PREFILL} tokens", 1, PREFILL, PREFILL), roof)
