"""What paged attention means: loops over sequences, dense attention in float64. Plain layout only."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch
from torch import Tensor

from kernels.paged_attention.fp8 import from_fp8
from kernels.paged_attention.layout import KVCache


def paged_attention_reference(  # noqa: PLR0913 - a kernel's arguments are its tensors
    query: Tensor,
    kv_cache: KVCache,
    block_tables: Tensor,
    query_start_locs: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
) -> Tensor:
    """Attend each sequence's rows of `query` `[T, H, D]` to its cached keys and values, causally."""
    out = torch.zeros_like(query)
    starts = query_start_locs.tolist()
    for s, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        if starts[s + 1] > starts[s] and context_len > 0:
            keys, values = gather_context(
                kv_cache, block_tables[s], context_len, sliding_window, query[rows].shape[0], dtype=torch.float64
            )
            out[rows] = _attend(query[rows], keys, values, scale=scale, sliding_window=sliding_window)
    return out


def gather_context(
    kv_cache: KVCache,
    block_table: Tensor,
    context_len: int,
    sliding_window: int,
    num_new: int,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Copy the keys and values that one sequence's new tokens can see, `[K, G, D]` each, K up to `context_len`."""
    first_seen = max(0, context_len - num_new - sliding_window + 1) if sliding_window else 0
    slots = torch.arange(first_seen, context_len, device=block_table.device)
    blocks = block_table[slots // kv_cache.block_size].long()
    offsets = slots % kv_cache.block_size
    at = (blocks, offsets)
    return (
        _widened(kv_cache.keys, kv_cache.key_scales, at, dtype),
        _widened(kv_cache.values, kv_cache.value_scales, at, dtype),
    )


def _widened(tensor: Tensor, scales: Tensor | None, at: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    if scales is None:
        return tensor[at].to(dtype)
    # torch indexes no fp8 on the CPU.
    return from_fp8(tensor.view(torch.uint8)[at].view(tensor.dtype), scales[at], dtype)


def _attend(query: Tensor, keys: Tensor, values: Tensor, *, scale: float, sliding_window: int) -> Tensor:
    """Dense causal attention of the last `query.shape[0]` of K tokens."""
    num_new, num_heads, _ = query.shape
    num_seen, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    keys = keys.double().repeat_interleave(group, dim=1)  # [K, H, D]
    values = values.double().repeat_interleave(group, dim=1)  # [K, H, D]

    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    ages = torch.arange(num_seen - num_new, num_seen, device=query.device)[:, None] - torch.arange(
        num_seen, device=query.device
    )  # [q, K]: how many tokens ago
    visible = (ages >= 0) & ((ages < sliding_window) if sliding_window else True)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
