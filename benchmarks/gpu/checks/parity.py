"""Whole models compared with transformers, and the engine with itself: section "parity" of `benchmarks gpu`.

On a GPU the decoder runs the compiled kernels; on the CPU the interpreted ones.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any  # transformers' models have many types

import torch
from torch import Tensor

from benchmarks.gpu.checks.determinism import same_bits
from benchmarks.gpu.checks.sameness import same_tokens
from benchmarks.gpu.checks.sanitizer import sanitized
from benchmarks.gpu.models import (
    FAMILIES,
    calls_line,
    generate_greedily,
    load_folder,
    logits_of_prompts,
    save_small_model,
    triton_in_place_of_cpu,
)
from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from sluice.engine.models.load import WeightForm
from sluice.kernels.paged_attention import FP8

TOY_FAMILIES = ("qwen3", "gemma2", "gemma3")
"""Together they cover every branch of the kernels: windows, norms of heads and after blocks, offsets, soft caps."""


def groups(scale: Scale) -> Groups:
    """Return each family compared with transformers', the engine with itself, and the kernels under the sanitizer."""
    calls = Counter[str]()
    families = {name: partial(_family, scale, calls, name) for name in (TOY_FAMILIES if scale.is_toy else FAMILIES)}
    last = {"calls": lambda: [calls_line(calls)]} if scale.is_toy else {}
    return {**families, **same_tokens(scale, calls), **last, **same_bits(scale), **sanitized(scale)}


def _family(scale: Scale, calls: Counter[str], name: str) -> Iterator[Line]:
    """Check logits of every position in each dtype, and the greedy tokens of an engine under preemption in float32.

    `calls` counts those of interpreted kernels.
    """
    with (
        triton_in_place_of_cpu(calls) if scale.is_toy else nullcontext(),
        tempfile.TemporaryDirectory() as folder,
    ):
        model = save_small_model(name, Path(folder)).to(scale.device)
        yield _greedy(scale, name, model, Path(folder))
        for dtype in (torch.float32,) if scale.is_toy else (torch.bfloat16, torch.float32):
            yield _logits(scale, name, model, Path(folder), dtype)
        yield _narrow_logits(scale, name, model, Path(folder))


def _prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 200, (length,), generator=generator).tolist() for length in lengths]


def _logits(scale: Scale, name: str, model: Any, folder: Path, dtype: torch.dtype) -> Line:  # noqa: ANN401 - transformers'
    """Check errors against transformers in float64; in bfloat16 relative to transformers' own."""
    prompts = _prompts(scale.pick([1, 17, 64, 300, 129], [7, 6]))
    decoder = load_folder(folder, WeightForm(dtype, scale.device))
    actual = torch.cat(logits_of_prompts(decoder, prompts, chunk=_chunk(scale), cache_dtype=dtype)).double()
    exact = _transformers_logits(model, prompts, torch.float64)
    ours = _rms(actual - exact) / _rms(exact)
    theirs = _rms(_transformers_logits(model, prompts, dtype) - exact) / _rms(exact)
    figures: dict[str, float | str] = {"rms error": ours, "of transformers' own": ours / theirs}
    # Below a millionth it is the order of float32's sums, and which is nearer is chance.
    return Line(f"{name}, logits, {str(dtype).removeprefix('torch.')}", figures, ours < max(1.5 * theirs, 2e-6))


def _narrow_logits(scale: Scale, name: str, model: Any, folder: Path) -> Line:  # noqa: ANN401 - transformers'
    """Check weights in int8, keys and values in fp8, against transformers in float64: their combined cost.

    Independent roundings of 0.4 % per weight and 2 % per key or value add up to a few per cent; a wrong scale or block,
    to as much as the logits themselves.
    """
    prompts = _prompts(scale.pick([1, 17, 64, 300, 129], [7, 6]))
    dtype = torch.float16 if scale.is_toy else torch.bfloat16
    decoder = load_folder(folder, WeightForm(dtype, scale.device, quantization="int8"))
    actual = torch.cat(logits_of_prompts(decoder, prompts, chunk=_chunk(scale), cache_dtype=FP8)).double()
    exact = _transformers_logits(model, prompts, torch.float64)
    error = _rms(actual - exact) / _rms(exact)
    return Line(f"{name}, logits, int8 weights and fp8 cache", {"rms error": error}, error < 0.1)


def _chunk(scale: Scale) -> int:
    """Tokens of each prompt per step."""
    return 4 if scale.is_toy else 100


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _transformers_logits(model: Any, prompts: list[list[int]], dtype: torch.dtype) -> Tensor:  # noqa: ANN401 - transformers'
    # A copy: in a narrower dtype and back, the weights would be rounded.
    model = deepcopy(model).to(dtype)
    rows = [model(torch.tensor([prompt], device=model.device)).logits[0].double() for prompt in prompts]
    return torch.cat(rows)


def _greedy(scale: Scale, name: str, model: Any, folder: Path) -> Line:  # noqa: ANN401 - transformers'
    """Return the tokens of an engine with small chunks, a prefix cache and so few blocks that it must preempt.

    With a sliding window it need not: blocks that left the window are given back.
    """
    # Together they exceed the cache that just holds the longest.
    prompts, max_tokens = _prompts(scale.pick([40, 41, 33, 64, 50], [7, 6])), 6 if scale.is_toy else 40
    tokens, num_preemptions = generate_greedily(folder, scale.device, prompts, max_tokens=max_tokens)
    expected = [
        model.generate(
            torch.tensor([prompt], device=scale.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=scale.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    num_equal = sum(ours == theirs for ours, theirs in zip(tokens, expected, strict=True))
    figures: dict[str, float | str] = {
        "sequences": len(prompts),
        "equal": num_equal,
        "tokens each": max_tokens,
        "preemptions": num_preemptions,
    }
    has_window = "sliding_window" in FAMILIES[name][1]
    is_right = num_equal == len(prompts) and (has_window or num_preemptions > 0)
    return Line(f"{name}, greedy tokens, float32", figures, is_right)
