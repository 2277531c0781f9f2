"""Attention over a paged KV cache (Kwon et al., SOSP 2023), for prefill chunks and decodes in one batch."""

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows
from sluice.kernels.paged_attention.call import AttentionCall
from sluice.kernels.paged_attention.layout import KVCache, Layout
from sluice.kernels.paged_attention.narrow import FP8, INT8

__all__ = ["FP8", "INT8", "KVCache", "Layout", "allocate_kv_cache", "kv_block_bytes", "paged_attention"]


def allocate_kv_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Make one layer's cache, zeroed, in the layout of the device's kernel.

    `dtype` is the model's or, with half the memory and half of what a decode reads, `FP8` for a GPU and `INT8` for a
    CPU and queries in bfloat16. The CPU's native kernel has no fp8: torch operators are used for it there.
    """
    if device.type == "cuda":
        from sluice.kernels.paged_attention.kernel import allocate_cuda

        return allocate_cuda(num_blocks, block_size, num_kv_heads, head_size, dtype=dtype, device=device)
    from sluice.kernels.paged_attention.cpu import allocate_cpu

    return allocate_cpu(num_blocks, block_size, num_kv_heads, head_size, dtype=dtype)


def kv_block_bytes(
    block_size: int, num_kv_heads: int, head_size: int, *, dtype: torch.dtype, device: torch.device
) -> int:
    """Return the memory of one block of one layer, without using a GPU."""
    if device.type == "cuda":
        from sluice.kernels.paged_attention.kernel import allocate_cuda

        nowhere = torch.device("meta")
        return allocate_cuda(1, block_size, num_kv_heads, head_size, dtype=dtype, device=nowhere).num_bytes
    return allocate_kv_cache(1, block_size, num_kv_heads, head_size, dtype=dtype, device=device).num_bytes


def paged_attention(  # noqa: PLR0913 - a kernel's arguments are its tensors
    query: Tensor,
    kv_cache: KVCache,
    block_tables: Tensor,
    query_start_locs: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_context_len: int,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each sequence's new tokens causally to its cached keys and values, which include the new ones.

    The new tokens of sequence s are rows `query_start_locs[s]` to `query_start_locs[s + 1]` of `query`; the last of
    them is at position `context_lens[s] - 1`. Only slots below `context_lens[s]` and inside the window are used; the
    contents of others (NaN, say) do not matter. A sequence without new tokens is skipped; rows of `query` past the last
    sequence's, and rows of a sequence whose `context_lens` is 0, become zeros.

    Args:
        query: `[T, H, D]`, float32, float16 or bfloat16; tokens and heads may be strided, D is contiguous.
        kv_cache: of G key-value heads, dtype of `query`, fp8 or int8; G divides H.
        block_tables: `[S, max_blocks]` int32, rows may be strided; entries past a sequence's last block, and those
            wholly before the window of its first new token, are not read.
        query_start_locs: `[S + 1]` int32, ascending from 0.
        context_lens: `[S]` int32, in tokens, including the new ones.
        scale: factor on the scores, above 0, usually `D ** -0.5`.
        max_query_len: maximum new tokens of one sequence: lets a launcher choose without reading the device.
        max_context_len: `max(context_lens)`, or more.
        sliding_window: a token attends to itself and the `sliding_window - 1` before it. 0: all before it.
        soft_cap: a scaled score x becomes `soft_cap * tanh(x / soft_cap)` (Gemma 2, arXiv 2408.00118); from 1e-20 to
            1e20. 0: none.
        sinks: `[H]` float32, contiguous: a logit per head that takes part in the softmax of its rows and has no
            value (StreamingLLM, arXiv 2309.17453, with the sink learned, as in gpt-oss); -inf for none. None: no sinks.
        out: `[T, H, D]`, contiguous, dtype of `query`; allocated if None.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or strides disagree, H is not a multiple of G, or a number is out of its range.
    """
    _check_factors(scale, soft_cap)
    check(query.dim() == 3, "query must be [T, H, D], got {}", query.shape)
    check(query.shape[2] == kv_cache.head_size, "query has head size {}, not {}", query.shape[2], kv_cache.head_size)
    check(query.shape[1] % kv_cache.num_kv_heads == 0, "query heads must be a multiple of key-value heads")
    kv_cache.check_dtype("query", query.dtype)
    check_rows("query", query)
    _check_tables(block_tables, query_start_locs, context_lens)
    _check_sinks(sinks, query)
    num_slots = block_tables.shape[1] * kv_cache.block_size
    check(max_context_len <= num_slots, "block_tables hold {} tokens, not {}", num_slots, max_context_len)
    out = query.new_empty(query.shape) if out is None else out
    check(out.shape == query.shape and out.dtype == query.dtype and out.is_contiguous(), "out must be as query")
    call = AttentionCall(
        query=query,
        kv_cache=kv_cache,
        block_tables=block_tables,
        query_start_locs=query_start_locs,
        context_lens=context_lens,
        scale=scale,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        out=out,
    )
    if call.num_tokens == 0:
        return out
    if call.num_sequences == 0:
        return out.zero_()
    path = path_of("paged_attention", query)
    if path is Path.TRITON:
        from sluice.kernels.paged_attention.kernel import paged_attention_triton as attend
    elif path is Path.INVARIANT:
        from sluice.kernels.paged_attention.invariant import paged_attention_invariant as attend
    else:
        from sluice.kernels.paged_attention.cpu import paged_attention_cpu as attend
    attend(call)
    return out


def _check_factors(scale: float, soft_cap: float) -> None:
    check(scale > 0, "scale must be above 0, got {}", scale)
    # Far enough from the limits of float32 that neither scale / soft_cap nor soft_cap times a number overflows.
    # Excludes NaN.
    in_range = soft_cap == 0 or 1e-20 <= soft_cap <= 1e20
    check(in_range, "soft_cap must be 0 or from 1e-20 to 1e20, got {}", soft_cap)


def _check_sinks(sinks: Tensor | None, query: Tensor) -> None:
    if sinks is None:
        return
    check(sinks.shape == query.shape[1:2], "sinks must be [{}], got {}", query.shape[1], sinks.shape)
    check(sinks.dtype == torch.float32 and sinks.is_contiguous(), "sinks must be float32 and contiguous")
    check(sinks.device == query.device, "sinks must be on {}, got {}", query.device, sinks.device)


def _check_tables(block_tables: Tensor, query_start_locs: Tensor, context_lens: Tensor) -> None:
    is_int32 = block_tables.dtype == query_start_locs.dtype == context_lens.dtype == torch.int32
    check(is_int32, "block_tables, query_start_locs and context_lens must be int32")
    check_rows("block_tables", block_tables)
    num_sequences = context_lens.shape[0]
    check(block_tables.dim() == 2 and block_tables.shape[0] == num_sequences, "block_tables must be [S, max_blocks]")
    check(query_start_locs.shape == (num_sequences + 1,), "query_start_locs must be [S + 1]")
