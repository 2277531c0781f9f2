"""Paged attention on the CPU: native.c over the packed cache, or torch operators over the plain one."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from sluice.kernels.dtypes import DTYPE_CODES
from sluice.kernels.native import native_function
from sluice.kernels.paged_attention.call import AttentionCall
from sluice.kernels.paged_attention.layout import KVCache, Layout, allocate_packed, allocate_plain, padded
from sluice.kernels.paged_attention.narrow import INT8
from sluice.kernels.paged_attention.reference import gather_context, visible
from sluice.kernels.tiles import may_use_tiles

SIGNATURE = ("sluice_paged_attention", "ipllppplpppiiiiiiiiiiffppp")
_CHUNK_TOKENS = 512
"""Query tokens of one call of torch's attention."""

MAX_HEAD_SIZE = 256
"""Largest head size of the packed cache (`MAX_DP` in native.c)."""


def allocate_cpu(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, dtype: torch.dtype) -> KVCache:
    """Make a cache in the layout of this machine's kernel."""
    has_native = native_function(*SIGNATURE) is not None and head_size <= MAX_HEAD_SIZE
    if has_native and (dtype in DTYPE_CODES or dtype == INT8):
        return allocate_packed(num_blocks, block_size, num_kv_heads, head_size, dtype=dtype)
    return allocate_plain(num_blocks, block_size, num_kv_heads, head_size, dtype=dtype, device=torch.device("cpu"))


def paged_attention_cpu(call: AttentionCall) -> None:
    """Compute a call; see `kernels.paged_attention.paged_attention`."""
    attend = _attend_native if call.kv_cache.layout is Layout.PACKED else paged_attention_torch
    attend(call)


def _attend_native(call: AttentionCall) -> None:
    native = native_function(*SIGNATURE)
    assert native is not None, "a packed cache exists only with the native library"
    cache = call.kv_cache
    native(
        DTYPE_CODES[call.query.dtype],
        call.query.data_ptr(),
        call.query.stride(0),
        call.query.stride(1),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        call.block_tables.data_ptr(),
        call.block_tables.stride(0),
        call.query_start_locs.data_ptr(),
        call.context_lens.data_ptr(),
        call.out.data_ptr(),
        call.num_sequences,
        call.num_tokens,
        call.num_heads,
        cache.num_kv_heads,
        cache.head_size,
        cache.block_size,
        padded(cache.block_size),
        padded(cache.head_size),
        call.sliding_window,
        may_use_tiles(),
        call.scale,
        call.soft_cap,
        None if call.sinks is None else call.sinks.data_ptr(),
        None if cache.key_scales is None else cache.key_scales.data_ptr(),
        None if cache.value_scales is None else cache.value_scales.data_ptr(),
    )


def paged_attention_torch(call: AttentionCall) -> None:
    """Use one gather and one call of torch's attention per chunk of a sequence, a group's heads packed as query rows.

    Works on any device, and reads the lengths on the host. torch's attention supports neither soft cap nor sinks: with
    one of them it is computed by single operators.
    """
    query, out, window = call.query, call.out, call.sliding_window
    starts: list[int] = call.query_start_locs.tolist()
    for s, first, last, context_len in _chunks(starts, call.context_lens.tolist()):
        rows, num_new = slice(first, last), last - first
        if context_len == 0:
            out[rows] = 0
            continue
        table = call.block_tables[s]
        keys, values = gather_context(call.kv_cache, table, context_len, window, num_new, dtype=query.dtype)
        mask = visible(num_new, keys.shape[0], window, query.device) if num_new > 1 else None
        if call.soft_cap or call.sinks is not None:
            out[rows] = _attend_by_head(call, query[rows], keys, values, mask)
        else:
            out[rows] = _attend(query[rows], keys, values, mask, call.scale)
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


def _attend_by_head(call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Compute `_attend` in float32, one key-value head at a time to limit the memory of scores."""
    num_new, num_heads, head_size = query.shape
    num_kv_heads, group = keys.shape[1], num_heads // keys.shape[1]
    by_head = query.float().view(num_new, num_kv_heads, group, head_size).permute(1, 2, 0, 3)  # [G, group, q, D]
    attended = torch.empty_like(by_head)
    for g in range(num_kv_heads):
        scores = by_head[g] @ keys[:, g].float().T * call.scale  # [group, q, K]
        if call.soft_cap:
            scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
        if mask is not None:
            scores.masked_fill_(~mask, float("-inf"))
        if call.sinks is not None:
            of_heads = call.sinks[g * group : (g + 1) * group].view(group, 1, 1).expand(group, num_new, 1)
            scores = torch.cat([scores, of_heads], dim=-1)
        attended[g] = scores.softmax(dim=-1)[..., : keys.shape[0]] @ values[:, g].float()
    return attended.permute(2, 0, 1, 3).reshape(num_new, num_heads, head_size).to(query.dtype)
