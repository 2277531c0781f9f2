# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Paged attention of prefill chunks, and of the decodes in a batch with them, in Triton.

A program holds BLOCK_ROWS query rows of one key-value head: the heads that share it, of BLOCK_QUERIES consecutive
tokens of one sequence (grouped-query attention packed into the rows, as in vLLM's Triton backend and FlashInfer). It
walks all keys that they see.
"""

import triton
import triton.language as tl

from sluice.kernels.paged_attention.call import AttentionCall
from sluice.kernels.paged_attention.config import AttentionConfig
from sluice.kernels.paged_attention.tile import attend_keys, join_sinks, zero_padding


def attend_chunks(call: AttentionCall, config: AttentionConfig) -> None:
    """Launch the kernel."""
    block_queries = config.block_rows // call.group
    num_query_blocks = call.num_tokens // block_queries + call.num_sequences
    prefill_kernel[(num_query_blocks, call.kv_cache.num_kv_heads)](
        **call.arguments(),
        BLOCK_ROWS=config.block_rows,
        BLOCK_QUERIES=block_queries,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def _find_sequence(query_start_locs_ptr, query_block, S, BLOCK_QUERIES: tl.constexpr):
    """Find the last sequence whose first block is at or before `query_block`, by bisection.

    Sequence i owns blocks from `query_start_locs[i] // BLOCK_QUERIES + i`: an upper bound of the blocks before it that
    is strictly increasing in i and needs no prefix sum.
    """
    low = query_block * 0
    high = low + S
    while low < high:
        middle = (low + high) // 2
        first_block = tl.load(query_start_locs_ptr + middle) // BLOCK_QUERIES + middle
        if first_block <= query_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["T", "S", "window", "table_stride_sequence"])
def prefill_kernel(
    out_ptr,  # [T, H, D]
    query_ptr,  # [T, H, D]
    key_cache_ptr,  # [blocks, G, block_size, D] by its strides
    value_cache_ptr,  # as key_cache
    block_tables_ptr,  # [S, max_blocks] int32
    query_start_locs_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    key_scales_ptr,  # [blocks, G, block_size] float32 by its strides; unused unless IS_FP8
    value_scales_ptr,  # as key_scales
    sinks_ptr,  # [H] float32, or None
    score_scale,  # of a score in log2 units; with a soft cap, in units of the cap
    T,
    S,
    window,  # unused unless HAS_WINDOW
    out_stride_token,
    out_stride_head,
    query_stride_token,
    query_stride_head,
    key_stride_block,
    key_stride_head,
    key_stride_slot,
    value_stride_block,
    value_stride_head,
    value_stride_slot,
    scale_stride_block,
    scale_stride_head,
    scale_stride_slot,
    table_stride_sequence,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # 0.0: none
    IS_FP8: tl.constexpr,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per (block of queries, key-value head)."""
    kv_head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    rows = tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    heads = kv_head * GROUP + rows % GROUP  # [BLOCK_ROWS]

    padding = tl.load(query_start_locs_ptr + S) + tl.program_id(0)
    zero_padding(out_ptr, padding, T, out_stride_token, out_stride_head, heads, rows < GROUP, D, BLOCK_D, BLOCK_ROWS)

    # The last blocks of a prompt see the most keys, so they start first.
    query_block = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = _find_sequence(query_start_locs_ptr, query_block, S, BLOCK_QUERIES)
    query_start = tl.load(query_start_locs_ptr + sequence)
    query_len = tl.load(query_start_locs_ptr + sequence + 1) - query_start
    first_query = (query_block - (query_start // BLOCK_QUERIES + sequence)) * BLOCK_QUERIES
    if first_query >= query_len:
        return
    context_len = tl.load(context_lens_ptr + sequence)

    queries = first_query + rows // GROUP  # [BLOCK_ROWS], in the sequence's new tokens
    query_positions = context_len - query_len + queries
    inside = (rows < BLOCK_QUERIES * GROUP) & (queries < query_len)
    tokens = (query_start + queries).to(tl.int64)

    first_position = context_len - query_len + first_query
    end_key = tl.minimum(first_position + BLOCK_QUERIES, context_len)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position - window + 1, 0)
    tiles_start = first_key // TILE * TILE
    tiles_end = end_key

    query_ptrs = query_ptr + tokens[:, None] * query_stride_token + heads[:, None] * query_stride_head + dims[None, :]
    query = tl.load(query_ptrs, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
    acc, row_max, row_sum = attend_keys(
        query, query_positions, tiles_start, tiles_end, first_position, first_key, end_key,
        block_tables_ptr + sequence.to(tl.int64) * table_stride_sequence,
        key_cache_ptr + kv_head * key_stride_head,
        value_cache_ptr + kv_head * value_stride_head,
        key_scales_ptr + kv_head * scale_stride_head,
        value_scales_ptr + kv_head * scale_stride_head,
        key_stride_block, key_stride_slot, value_stride_block, value_stride_slot,
        scale_stride_block, scale_stride_slot, score_scale,
        window, HAS_WINDOW, SOFT_CAP, IS_FP8, D, BLOCK_D, BLOCK_SIZE, BLOCK_ROWS, TILE,
    )  # fmt: skip
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=inside, other=0.0)
        rescale, row_sum = join_sinks(row_max, row_sum, sinks)
        acc *= rescale[:, None]
    # A row without a visible key (padding) has sum 0 and becomes 0.
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_ptrs = out_ptr + tokens[:, None] * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (dims < D)[None, :])
