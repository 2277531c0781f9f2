"""Definition of paged attention: loops over sequences, dense attention in float64. Plain layout only."""

import torch
from torch import Tensor

from sluice.kernels.paged_attention.layout import KVCache
from sluice.kernels.paged_attention.narrow import from_8_bits


def paged_attention_reference(  # noqa: PLR0913 - a kernel's arguments are its tensors
    query: Tensor,
    kv_cache: KVCache,
    block_tables: Tensor,
    query_start_locs: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
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
            scores = _scores(query[rows], keys, scale=scale, soft_cap=soft_cap)
            _, num_new, num_seen = scores.shape
            seen = visible(num_new, num_seen, sliding_window, scores.device)
            scores = scores.masked_fill(~seen, float("-inf"))
            out[rows] = _weigh(scores, values, sinks).to(query.dtype)
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
    """Copy the keys and values visible to one sequence's new tokens, `[K, G, D]` each, K up to `context_len`."""
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
    # torch cannot index fp8 on the CPU.
    return from_8_bits(tensor.view(torch.uint8)[at].view(tensor.dtype), scales[at], dtype)


def _scores(query: Tensor, keys: Tensor, *, scale: float, soft_cap: float) -> Tensor:
    """Return the scores of the last q of K tokens, `[H, q, K]`."""
    keys = keys.double().repeat_interleave(query.shape[1] // keys.shape[1], dim=1)  # [K, H, D]
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    return soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores


def visible(num_new: int, num_seen: int, sliding_window: int, device: torch.device) -> Tensor:
    """Return which of the last K tokens each of the last q attends to, `[q, K]`."""
    positions = torch.arange(num_seen, device=device)
    ages = positions[num_seen - num_new :, None] - positions  # distance in tokens
    return (ages >= 0) & (ages < sliding_window) if sliding_window else ages >= 0


def _weigh(scores: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores `[H, q, K]` with each head's sink, which has no value: `[q, H, D]`."""
    num_heads, num_new, num_seen = scores.shape
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, num_new, 1)], dim=-1)
    values = values.double().repeat_interleave(num_heads // values.shape[1], dim=1)  # [K, H, D]
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., :num_seen], values)
