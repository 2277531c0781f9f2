"""Cases of the operations on the KV cache: its write, and attention over it in each phase of a model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sluice.kernels.chain import HOPPER_PREFILL, step_down, stepped_down
from sluice.kernels.paged_attention import FP8, KVCache, allocate_kv_cache, paged_attention
from sluice.kernels.paged_attention.narrow import from_8_bits, to_8_bits
from sluice.kernels.paged_attention.reference import paged_attention_reference
from sluice.kernels.trial.compare import WrongResult, require_close, require_same_rows
from sluice.kernels.trial.sizes import ModelSizes
from sluice.kernels.write_kv import HeadNorm, write_kv
from sluice.kernels.write_kv.reference import write_kv_reference

PHASES: Sequence[tuple[Sequence[int], Sequence[int]]] = (
    ((1, 1, 1), (1, 40, 300)),
    ((1, 1, 1), (3, 700, 1000)),
    ((1, 1), (3, 1500)),
    ((1, 1), (700, 4000)),
    ((1, 1), (3, 9000)),
    ((1,) * 40, tuple(range(1, 41))),
    *((lens, (lens[0], 300)) for lens in ((2, 1), (4, 1), (8, 3), (16, 1), (32, 1))),
    *((lens, (lens[0], 1500)) for lens in ((2, 1), (4, 1), (8, 3), (16, 1), (32, 1))),
    ((40, 1, 7), (40, 900, 600)),
    ((200, 1, 3), (200, 70, 700)),
    ((200, 130), (1200, 130)),
    ((6, 1), (3000, 700)),
    ((100, 1), (3000, 700)),
)
"""New tokens and contexts of sequences: decodes of few and many segments, many decodes, chunks, mixed, and
short chunks over long contexts."""


_PARTS_CONTEXT = 5600
"""Tokens of the prompt that is computed in parts: over a deterministic process's short segments, and two long ones."""


def make_cache(sizes: ModelSizes, num_blocks: int, device: torch.device) -> KVCache:
    """Make one layer's cache as a model does."""
    return allocate_kv_cache(
        num_blocks,
        sizes.block_size,
        sizes.num_kv_heads,
        sizes.head_size,
        dtype=FP8 if sizes.cache == "fp8" else sizes.torch_dtype,
        device=device,
    )


def attention_cases(sizes: ModelSizes, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield attention in each phase, for layers with each sliding window."""
    if sizes.is_deterministic:
        yield from (partial(_attend_in_parts, sizes, device, window) for window in sizes.sliding_windows)
    for phase, window in _phases(sizes):
        yield partial(_without_hopper, partial(_attend, sizes, device, *phase, window))


def hopper_cases(sizes: ModelSizes, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield attention of prompts where the kernel for Hopper computes it; nothing on another device."""
    if device.type != "cuda":
        return
    # It imports Triton, which a machine without a GPU may lack.
    from sluice.kernels.paged_attention.config import has_hopper_kernel, max_decode_tokens

    if not has_hopper_kernel(device):
        return
    for phase, window in _phases(sizes):
        if max(phase[0]) > max_decode_tokens(sizes.num_heads // sizes.num_kv_heads):
            yield partial(_attend, sizes, device, *phase, window)


def _without_hopper(case: Callable[[], None]) -> None:
    """Run a case with the kernel for any GPU, which computes what that for Hopper does not."""
    before = stepped_down()
    step_down({**before, HOPPER_PREFILL: "another kernel is tried"})
    try:
        case()
    finally:
        step_down(before)


def _phases(sizes: ModelSizes) -> Iterator[tuple[tuple[Sequence[int], Sequence[int]], int]]:
    """Yield the phases that a model's contexts allow, each once, with each sliding window."""
    seen: set[tuple[Sequence[int], Sequence[int]]] = set()
    for lens, contexts in PHASES:
        # A model of short contexts has no long ones.
        limited = tuple(min(n, sizes.max_model_len) for n in lens), tuple(min(n, sizes.max_model_len) for n in contexts)
        if limited not in seen:
            seen.add(limited)
            yield from ((limited, window) for window in sizes.sliding_windows)


def _attend(
    sizes: ModelSizes, device: torch.device, query_lens: Sequence[int], context_lens: Sequence[int], window: int
) -> None:
    contexts = torch.tensor(context_lens)
    num_blocks = -(-contexts // sizes.block_size)
    cache = make_cache(sizes, int(num_blocks.sum()), device)
    _fill(cache, sizes.torch_dtype)
    tables = torch.zeros(len(contexts), int(num_blocks.max()), dtype=torch.int32)
    dealt = torch.randperm(cache.num_blocks).int().split(num_blocks.tolist())
    for row, blocks in zip(tables, dealt, strict=True):
        row[: len(blocks)] = blocks
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
    query = torch.randn(sum(query_lens), sizes.num_heads, sizes.head_size, device=device).to(sizes.torch_dtype)
    tensors = (tables.to(device), starts, contexts.int().to(device))
    sinks = _sinks(sizes, device)
    actual = paged_attention(
        query,
        cache,
        *tensors,
        scale=sizes.attention_scale,
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        sliding_window=window,
        soft_cap=sizes.attention_soft_cap,
        sinks=sinks,
    )
    expected = paged_attention_reference(
        query.double(),
        _wide(cache),
        *tensors,
        scale=sizes.attention_scale,
        sliding_window=window,
        soft_cap=sizes.attention_soft_cap,
        sinks=sinks,
    )
    require_close(actual, expected)


def _sinks(sizes: ModelSizes, device: torch.device) -> Tensor | None:
    return torch.randn(sizes.num_heads, device=device) if sizes.has_sinks else None


def _attend_in_parts(sizes: ModelSizes, device: torch.device, window: int) -> None:
    """Check that a prompt has the same bits whole, in chunks of any length, and token by token."""
    length = min(_PARTS_CONTEXT, sizes.max_model_len)
    cache = make_cache(sizes, -(-length // sizes.block_size), device)
    _fill(cache, sizes.torch_dtype)
    table = torch.randperm(cache.num_blocks, device=device).int()[None]
    query = torch.randn(length, sizes.num_heads, sizes.head_size, device=device).to(sizes.torch_dtype)
    sinks = _sinks(sizes, device)

    def attended(first: int, last: int) -> Tensor:
        return paged_attention(
            query[first:last],
            cache,
            table,
            torch.tensor([0, last - first], dtype=torch.int32, device=device),
            torch.tensor([last], dtype=torch.int32, device=device),
            scale=sizes.attention_scale,
            max_query_len=last - first,
            max_context_len=last,
            sliding_window=window,
            soft_cap=sizes.attention_soft_cap,
            sinks=sinks,
        )

    whole = attended(0, length)
    for size in (1, 2, 17, 100):
        for last in range(length, max(0, length - 5 * size), -size):
            first = max(0, last - size)
            require_same_rows([attended(first, last), whole[first:last]])


def _fill(cache: KVCache, dtype: torch.dtype) -> None:
    """Fill a cache with random keys and values."""
    for part, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        heads = torch.randn(part.shape, device=part.device).to(dtype)
        if scales is None:
            part.copy_(heads)
        else:
            narrow, of_heads = to_8_bits(heads, FP8)
            part.view(torch.uint8).copy_(narrow.view(torch.uint8))
            scales.copy_(of_heads)


def _wide(cache: KVCache) -> KVCache:
    """Return the keys and values of `cache` in float64."""
    parts = ((cache.keys, cache.key_scales), (cache.values, cache.value_scales))
    wide = [p.double() if s is None else from_8_bits(p, s, torch.float64) for p, s in parts]
    return replace(cache, keys=wide[0], values=wide[1], key_scales=None, value_scales=None)


def write_cases(sizes: ModelSizes, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield a write of several tokens, one of them without a slot."""
    yield partial(_write, sizes, device)


def _write(sizes: ModelSizes, device: torch.device) -> None:
    dtype, num_tokens = sizes.torch_dtype, 7
    cache, expected_cache = (make_cache(sizes, 8, device) for _ in range(2))
    qkv = torch.randn(num_tokens, (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_size, device=device)
    slots = torch.randperm(8 * sizes.block_size)[:num_tokens].to(device)
    slots[1::5] = -1
    angles = torch.rand(64, max(sizes.rotary_size // 2, 1), device=device)[:, : sizes.rotary_size // 2]
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()
    norm = None
    if sizes.has_head_norm:
        weights = torch.randn(2, sizes.head_size, device=device).to(dtype)
        norm = HeadNorm(weights[0].clone(), weights[1].clone(), sizes.head_norm_eps, sizes.norm_offset)
    tokens = (qkv.to(dtype), torch.arange(num_tokens, device=device) * 3, slots, cos_sin)
    actual = write_kv(*tokens, cache, head_norm=norm)
    require_close(actual, write_kv_reference(*tokens, expected_cache, head_norm=norm))
    _require_same(cache, expected_cache, dtype)


def _require_same(cache: KVCache, expected: KVCache, dtype: torch.dtype) -> None:
    """Check keys and values; in fp8 they may differ by a step of that format, which is coarse.

    Raises:
        WrongResult: they differ by more.
    """
    for actual, like in zip(_parts(cache), _parts(expected), strict=True):
        if cache.is_fp8:
            if not float((actual - like).abs().max()) <= float(like.abs().max()) / 8:
                raise WrongResult("writes different keys and values from its reference")
        else:
            require_close(actual.to(dtype), like)


def _parts(cache: KVCache) -> tuple[Tensor, Tensor]:
    wide = _wide(cache)
    return wide.keys, wide.values
