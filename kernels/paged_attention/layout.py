"""Where a token's keys and values lie. The layout belongs to the attention kernel of the device."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

PACKED_TOKENS = 16
"""Tokens that lie side by side in the packed layout: one vector of 16 lanes."""


class Layout(Enum):
    """How the two tensors of a `KVCache` are laid out. B blocks, N slots a block, G key-value heads, D head size."""

    PLAIN = "plain"
    """Keys and values `[B, N, G, D]`. For CUDA, and for the torch path on the CPU."""

    PACKED = "packed"
    """For the native CPU kernel: what one vector instruction (or AMX tile) reads lies side by side.

    N is rounded up to P, a multiple of 16. bfloat16 and float16: keys `[B, G, P / 16, D / 2, 16, 2]` (16 tokens
    beside each other, pairs along D), values `[B, G, P / 2, D, 2]` (pairs along tokens). float32: keys
    `[B, G, P / 16, D, 16]`, values `[B, G, P, D]`.
    """


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


def allocate_plain(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Make a cache of zeros in the plain layout."""
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    return KVCache(
        keys=torch.zeros(shape, dtype=dtype, device=device),
        values=torch.zeros(shape, dtype=dtype, device=device),
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layout=Layout.PLAIN,
    )
