"""Memory layouts of cached keys and values. The layout belongs to the attention kernel of the device."""

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from sluice.kernels.checks import check
from sluice.kernels.paged_attention.narrow import FP8, INT8, LARGEST
from sluice.kernels.pages import zero_pages

PACKED_LANES = 16
"""Adjacent elements in the packed layout: one vector of float32."""


class Layout(Enum):
    """Layout of the two tensors of a `KVCache`. B blocks, N slots per block, G key-value heads, D head size."""

    PLAIN = "plain"
    """Keys and values `[B, N, G, D]`. For CUDA, and for the torch path on the CPU."""

    PACKED = "packed"
    """For the native CPU kernel: the elements that one vector instruction (or AMX tile) reads are adjacent.

    N and D are rounded up to P and E, multiples of 16. bfloat16: keys `[B, G, P / 16, E / 2, 16, 2]` (16 adjacent
    tokens, pairs along D), values `[B, G, P / 2, E, 2]` (pairs along tokens). float32: keys `[B, G, P / 16, E, 16]`,
    values `[B, G, P, E]`. int8 as bfloat16. Elements past D are 0 in every slot that was written.
    """


def padded(size: int) -> int:
    """Round `size` up to whole vectors."""
    return -(-size // PACKED_LANES) * PACKED_LANES


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Keys and values of one layer: `num_blocks` blocks of `block_size` token slots."""

    keys: Tensor
    values: Tensor
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    layout: Layout
    key_scales: Tensor | None = None
    """Float32, of a cache in 8 bits: each head's scale (see `narrow`), `[B, N, G]` in the plain layout, `[B, G, P]` in
    the packed one. None for every other dtype.
    """

    value_scales: Tensor | None = None
    table: int = 0
    """Which of a sequence's block tables are of its blocks: 0, or 1 and more for window groups."""

    @property
    def is_fp8(self) -> bool:
        """Whether keys and values are 8-bit floats with scales."""
        return self.keys.dtype == FP8

    @property
    def num_bytes(self) -> int:
        """Memory of the cache in bytes."""
        parts = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(part.nbytes for part in parts if part is not None)

    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Check that a tensor of `dtype` can be used with the cache.

        Raises:
            ValueError: it cannot.
        """
        is_bfloat16 = dtype == torch.bfloat16
        holds = self.is_fp8 or (self.keys.dtype == INT8 and is_bfloat16) or self.keys.dtype == dtype
        check(holds, "{} is {}, the cache {}", name, dtype, self.keys.dtype)


def allocate_plain(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Make a cache of zeros in the plain layout; with scales for `FP8` and `INT8`."""
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    scales = [zero_pages(shape[:-1], torch.float32, device) if dtype in LARGEST else None for _ in range(2)]
    return KVCache(
        keys=zero_pages(shape, dtype, device),
        values=zero_pages(shape, dtype, device),
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layout=Layout.PLAIN,
        key_scales=scales[0],
        value_scales=scales[1],
    )


def allocate_packed(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, dtype: torch.dtype
) -> KVCache:
    """Make a cache of zeros in the packed layout, for the CPU."""
    slots, elements, lanes = padded(block_size), padded(head_size), PACKED_LANES
    pair = 1 if dtype == torch.float32 else 2
    key_shape = (num_blocks, num_kv_heads, slots // lanes, elements // pair, lanes, pair)
    value_shape = (num_blocks, num_kv_heads, slots // pair, elements, pair)
    scale_shape, cpu = (num_blocks, num_kv_heads, slots), torch.device("cpu")
    scales = [zero_pages(scale_shape, torch.float32, cpu) if dtype == INT8 else None for _ in range(2)]
    return KVCache(
        keys=zero_pages(key_shape, dtype, cpu),
        values=zero_pages(value_shape, dtype, cpu),
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layout=Layout.PACKED,
        key_scales=scales[0],
        value_scales=scales[1],
    )


def unpacked(cache: KVCache) -> KVCache:
    """Copy `cache` to the plain layout."""
    if cache.layout is Layout.PLAIN:
        return cache
    shape = (cache.num_blocks, -1, cache.num_kv_heads, padded(cache.head_size))
    used = (slice(None), slice(cache.block_size), slice(None), slice(cache.head_size))
    return replace(
        cache,
        keys=cache.keys.permute(0, 2, 4, 1, 3, 5).reshape(shape)[used],
        values=cache.values.permute(0, 2, 4, 1, 3).reshape(shape)[used],
        layout=Layout.PLAIN,
        key_scales=_plain_scales(cache, cache.key_scales),
        value_scales=_plain_scales(cache, cache.value_scales),
    )


def _plain_scales(cache: KVCache, scales: Tensor | None) -> Tensor | None:
    return None if scales is None else scales[..., : cache.block_size].transpose(1, 2).contiguous()
