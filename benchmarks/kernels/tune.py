"""Measure kernel configurations on this GPU, and write the best to the table that launches use.

    python -m benchmarks tune-kernels [--shapes 8B,1B,0.6B] [--write]
    python -m benchmarks tune-kernels --device cpu      # toy sizes, interpreted: does it all run?

Every candidate's result is first compared with that of the rules' choice; one that differs is reported and rejected.
Without --write nothing is changed. A new table may change sampled tokens, since sums are then split elsewhere: write it
before a GPU begins to serve, not while jobs are to be resumed.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from itertools import product
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.gpu.scale import Scale
    from benchmarks.kernels.cases import AttentionInputs
    from sluice.kernels.linear.kernel import ProductConfig
    from sluice.kernels.paged_attention.config import AttentionConfig

Config = TypeVar("Config", "AttentionConfig", "ProductConfig")

HEADS = {"8B": (32, 8, 128), "1B": (32, 8, 64), "0.6B": (16, 8, 128), "toy": (4, 2, 16)}
"""Query heads, key-value heads, head size."""

WEIGHTS = {
    "8B": ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)),
    "1B": ((3072, 2048), (2048, 2048), (16_384, 2048), (2048, 8192)),
    "0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "toy": ((48, 40),),
}
"""Outputs by inputs of a layer's products."""

CLEARLY = 0.98
"""A candidate replaces the rules' choice only if it takes less than this share of its time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write if asked; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: toy sizes, interpreted.")
    parser.add_argument("--shapes", default="8B,1B,0.6B", help="Models whose shapes are measured.")
    parser.add_argument("--write", action="store_true", help="Put what is found into kernels/tuned.json.")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu":
        # Before Triton is imported, which reads it once.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from benchmarks.gpu.scale import card_scale, toy_scale
    from sluice.kernels.tuned import card_name, write_table

    is_toy = arguments.device == "cpu"
    scale = toy_scale() if is_toy else card_scale()
    shapes = ["toy"] if is_toy else arguments.shapes.split(",")
    with torch.inference_mode():
        table = {
            "paged_attention": dict(found for shape in shapes for found in _attention(scale, shape)),
            "int8_product": dict(found for shape in shapes for found in _products(scale, shape)),
        }
    if arguments.write:
        write_table(card_name(scale.device), table)
    return 0


def _attention(scale: "Scale", shape: str) -> Iterator[tuple[str, Sequence[int]]]:
    from benchmarks.gpu.speed.kernels import plain_attention
    from sluice.kernels.paged_attention.config import AttentionConfig, attention_config, launch_key

    heads = HEADS[shape]
    batches = {"decodes": ([1] * 32, [4096] * 32), "drafts": ([6] * 32, [4096] * 32), "prefill": ([2048], [4096])}
    if scale.is_toy:
        batches = {"decodes": ([1, 1], [40, 9]), "prefill": ([20], [30])}
    group = heads[0] // heads[1]
    for (name, (query_lens, context_lens)), is_fp8 in product(batches.items(), (False, True)):
        inputs = plain_attention(scale, query_lens, context_lens, heads, is_fp8=is_fp8)
        kind = {
            "element_bytes": scale.dtype.itemsize,
            "head_size": heads[2],
            "group": group,
            "max_query_len": max(query_lens),
        }
        rule = attention_config(**kind, is_fp8=is_fp8)
        sizes = product({rule.block_rows, max(16, rule.block_rows // 2)}, (16, 32, 64, 128), (4, 8), (2, 3, 4, 5))
        candidates = [AttentionConfig(*size) for size in sizes if size[0] >= group]
        label = f"{shape}, {name}{', fp8 cache' if is_fp8 else ''}"
        best = fastest(scale, label, _attending(inputs), rule, candidates[:3] if scale.is_toy else candidates)
        yield launch_key(**kind, is_fp8=is_fp8), astuple(best)


def _attending(inputs: "AttentionInputs") -> "Callable[[AttentionConfig], Tensor]":
    from sluice.kernels.paged_attention.kernel import paged_attention_triton

    def attend(config: "AttentionConfig") -> "Tensor":
        out = inputs.query.new_empty(inputs.query.shape)
        paged_attention_triton(
            inputs.query,
            inputs.kv_cache,
            inputs.block_tables,
            inputs.query_start_locs,
            inputs.context_lens,
            scale=inputs.scale,
            max_query_len=inputs.max_query_len,
            max_context_len=inputs.max_context_len,
            out=out,
            config=config,
        )
        return out

    return attend


def _products(scale: "Scale", shape: str) -> Iterator[tuple[str, Sequence[int]]]:
    import torch

    from sluice.kernels.linear.int8 import quantized
    from sluice.kernels.linear.kernel import ProductConfig, product_config, product_key

    for out_size, in_size in WEIGHTS[shape]:
        num_tokens = 2 if scale.is_toy else 16
        kind = {"out_size": out_size, "in_size": in_size, "num_tokens": num_tokens}
        rule = product_config(**kind)
        weight, scales = quantized(torch.randn(out_size, in_size, device=scale.device))
        # More weights than the GPU's cache holds, as in the layers of a model.
        weights = [weight.clone() for _ in range(1 if scale.is_toy else max(1, 2**28 // weight.numel()))]
        x = torch.randn(num_tokens, in_size, device=scale.device).to(scale.dtype)

        sizes = product((64, 128), (8, 16), (128, 256), (1, 2, 4), (4, 8), (3, 4, 5))
        candidates = [ProductConfig(*size) for size in sizes]
        label = f"{shape}, int8 {out_size} x {in_size}"
        best = fastest(
            scale, label, _multiplying(x, weights, scales), rule, candidates[:2] if scale.is_toy else candidates
        )
        yield product_key(**kind), astuple(best)


def _multiplying(x: "Tensor", weights: "list[Tensor]", scales: "Tensor") -> "Callable[[ProductConfig], Tensor]":
    from sluice.kernels.linear.kernel import int8_product_triton

    def multiply(config: "ProductConfig") -> "Tensor":
        out = x.new_empty(x.shape[0], scales.shape[0])
        for weight in weights:
            int8_product_triton(x, weight, scales, None, out=out, config=config)
        return out

    return multiply


def fastest(
    scale: "Scale", label: str, compute: Callable[[Config], "Tensor"], rule: Config, candidates: Sequence[Config]
) -> Config:
    """Return the fastest candidate with the result of `rule`, if it is clearly faster; else `rule`."""
    expected = compute(rule).double()
    best, best_us = rule, CLEARLY * scale.timer.device_us(lambda: compute(rule))
    rule_us = best_us / CLEARLY
    for candidate in candidates:
        try:
            error = (compute(candidate).double() - expected).norm() / expected.norm()
        except Exception as problem:  # noqa: BLE001 - one that does not fit the card is no candidate
            print(f"  {label}: {candidate} cannot be launched: {type(problem).__name__}")
            continue
        if not float(error) < 0.01:
            print(f"  {label}: {candidate} is WRONG by {float(error):.3g}, left out")
            continue
        us = scale.timer.device_us(lambda candidate=candidate: compute(candidate))
        if us < best_us:
            best, best_us = candidate, us
    print(f"{label}: {best}, {rule_us:.1f} us by the rules, {min(best_us, rule_us):.1f} us now", flush=True)
    return best


if __name__ == "__main__":
    sys.exit(main())
