"""Paged attention on the CPU: native.c over the packed cache, or torch operators over the plain one."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from sluice.kernels.dtypes import DTYPE_CODES
from sluice.kernels.native import native_function
from sluice.kernels.paged_attention.layout import KVCache, Layout, allocate_packed, allocate_plain, padded
from sluice.kernels.paged_attention.reference import gather_context
from sluice.kernels.tiles import may_use_tiles

SIGNATURE = ("sluice_paged_attention", "ipllppplpppiiiiiiiiiiffp")
_CHUNK_TOKENS = 512
"""Query tokens of one call of torch's attention."""

MAX_HEAD_SIZE = 256
"""Largest head size of the packed cache (`MAX_DP` in native.c)."""


def allocate_cpu(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, dtype: torch.dtype) -> KVCache:
    """Make a cache in the layout of this machine's kernel."""
    if dtype in DTYPE_CODES and head_size <= MAX_HEAD_SIZE and native_function(*SIGNATURE) is not None:
        return allocate_packed(num_blocks, block_size, num_kv_heads, head_size, dtype=dtype)
    return allocate_plain(num_blocks, block_size, num_kv_heads, head_size, dtype=dtype, device=torch.device("cpu"))


def paged_attention_cpu(
    query: Tensor,
    kv_cache: KVCache,
    block_tables: Tensor,
    query_start_locs: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_context_len: int,
    sliding_window: int,
    soft_cap: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Write the attention of `query` `[T, H, D]` to `out`."""
    attend = _attend_native if kv_cache.layout is Layout.PACKED else paged_attention_torch
    attend(
        query,
        kv_cache,
        block_tables,
        query_start_locs,
        context_lens,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        out=out,
    )


def _attend_native(
    query: Tensor,
    kv_cache: KVCache,
    block_tables: Tensor,
    query_start_locs: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    native = native_function(*SIGNATURE)
    assert native is not None, "a packed cache exists only with the native library"
    native(
        DTYPE_CODES[query.dtype],
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        kv_cache.keys.data_ptr(),
        kv_cache.values.data_ptr(),
        block_tables.data_ptr(),
        block_tables.stride(0),
        query_start_locs.data_ptr(),
        context_lens.data_ptr(),
        out.data_ptr(),
        context_lens.shape[0],
        query.shape[0],
        query.shape[1],
        kv_cache.num_kv_heads,
        kv_cache.head_size,
        kv_cache.block_size,
        padded(kv_cache.block_size),
        padded(kv_cache.head_size),
        sliding_window,
        may_use_tiles(),
        scale,
        soft_cap,
        None if sinks is None else sinks.data_ptr(),
    )


def paged_attention_torch(
    query: Tensor,
    kv_cache: KVCache,
    block_tables: Tensor,
    query_start_locs: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Use one gather and one call of torch's attention per chunk of a sequence, a group's heads packed as query rows.

    Works on any device, and reads the lengths on the host. torch's attention supports neither soft cap nor sinks: with
    one of them it is computed by single operators.
    """
    starts: list[int] = query_start_locs.tolist()
    for s, first, last, context_len in _chunks(starts, context_lens.tolist()):
        rows, num_new = slice(first, last), last - first
        if context_len == 0:
            out[rows] = 0
            continue
        keys, values = gather_context(
            kv_cache, block_tables[s], context_len, sliding_window, num_new, dtype=query.dtype
        )
        mask = _visible(num_new, keys.shape[0], sliding_window, query.device) if num_new > 1 else None
        if soft_cap or sinks is not None:
            out[rows] = _attend_by_head(query[rows], keys, values, mask, scale=scale, soft_cap=soft_cap, sinks=sinks)
        else:
            out[rows] = _attend(query[rows], keys, values, mask, scale)
    out[starts[-1] :] = 0


def _chunks(starts: list[int], context_lens: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield sequence, rows and context of each chunk: masks and scores of a whole prompt could exceed the memory."""
    for s, context_len in enumerate(context_lens):
        for first in range(starts[s], starts[s + 1], _CHUNK_TOKENS):
            last = min(first + _CHUNK_TOKENS, starts[s + 1])
            yield s, first, last, max(0, context_len - (starts[s + 1] - last))


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    num_new, num_heads, head_size = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    packed = query.view(num_new, num_kv_heads, group, head_size).permute(1, 2, 0, 3)  # [G, group, q, D]
    packed = packed.reshape(1, num_kv_heads, group * num_new, head_size)
    if mask is not None:
        mask = mask.repeat(group, 1)
    attended = F.scaled_dot_product_attention(
        packed, keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0), attn_mask=mask, scale=scale
    )
    unpacked = attended.view(num_kv_heads, group, num_new, head_size).permute(2, 0, 1, 3)
    return unpacked.reshape(num_new, num_heads, head_size)


def _attend_by_head(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute `_attend` in float32, one key-value head at a time to limit the memory of scores."""
    num_new, num_heads, head_size = query.shape
    num_kv_heads, group = keys.shape[1], num_heads // keys.shape[1]
    by_head = query.float().view(num_new, num_kv_heads, group, head_size).permute(1, 2, 0, 3)  # [G, group, q, D]
    attended = torch.empty_like(by_head)
    for g in range(num_kv_heads):
        scores = by_head[g] @ keys[:, g].float().T * scale  # [group, q, K]
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if mask is not None:
            scores.masked_fill_(~mask, float("-inf"))
        if sinks is not None:
            of_heads = sinks[g * group : (g + 1) * group].view(group, 1, 1).expand(group, num_new, 1)
            scores = torch.cat([scores, of_heads], dim=-1)
        attended[g] = scores.softmax(dim=-1)[..., : keys.shape[0]] @ values[:, g].float()
    return attended.permute(2, 0, 1, 3).reshape(num_new, num_heads, head_size).to(query.dtype)


def _visible(num_new: int, num_seen: int, sliding_window: int, device: torch.device) -> Tensor:
    """Return which of the last K tokens each of the last q attends to, `[q, K]`."""
    positions = torch.arange(num_seen, device=device)
    ages = positions[num_seen - num_new :, None] - positions
    return (ages >= 0) & (ages < sliding_window) if sliding_window else ages >= 0
