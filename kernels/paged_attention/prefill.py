# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Paged attention of prefill chunks in Triton.

A program holds BLOCK_ROWS query rows of one key-value head: the heads that share it, of BLOCK_QUERIES consecutive
tokens of one sequence (grouped-query attention packed into the rows, as in vLLM's Triton backend and FlashInfer). It
walks all keys that they see, in one loop (`attend_keys`): only tiles at an edge of what a row sees compute a mask.
"""

import triton
import triton.language as tl

from sluice.kernels.paged_attention.call import LOG2_E, AttentionCall, Chunks
from sluice.kernels.paged_attention.config import AttentionConfig
from sluice.kernels.paged_attention.tile import is_short_chunk, store_rows, visible_keys, zero_padding
from sluice.kernels.tanh.kernel import tanh

_LOG2_E = tl.constexpr(LOG2_E)
_VALUE_UNITS = tl.constexpr(256.0)


def attend_chunks(call: AttentionCall, config: AttentionConfig, chunks: Chunks) -> None:
    """Launch the kernel for all sequences of `chunks` that are not short."""
    block_queries = config.block_rows // call.group
    num_query_blocks = call.num_tokens // block_queries + call.num_sequences
    prefill_kernel[(call.kv_cache.num_kv_heads, num_query_blocks)](
        **call.arguments(),
        **call.cache_strides(),
        **chunks.arguments(),
        BLOCK_ROWS=config.block_rows,
        BLOCK_QUERIES=block_queries,
        TILE=config.tile,
        QUERY_IN_REGISTERS=call.query.element_size() * call.kv_cache.head_size <= 256,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def find_sequence(query_start_locs_ptr, query_block, S, BLOCK_QUERIES: tl.constexpr):
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


@triton.jit
def _block_ids(table_ptr, tile_start, first_key, end_key, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Load the block of each key of a tile, 0 where there is no key to read."""
    positions = tile_start + tl.arange(0, TILE)  # [TILE]
    is_key = (positions >= first_key) & (positions < end_key)
    return tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_key, other=0)


@triton.jit
def attend_keys(
    query,  # [BLOCK_ROWS, BLOCK_D]
    query_positions,  # [BLOCK_ROWS]
    first_position,  # of the rows
    last_position,
    first_key,  # that any row sees
    tiles_start,  # a multiple of TILE
    end_key,
    table_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    score_scale,
    window,
    key_stride_block,
    key_stride_slot,
    value_stride_block,
    value_stride_slot,
    scale_stride_block,
    scale_stride_slot,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Walk the keys from `tiles_start` to `end_key` for a block of rows.

    Returns the sums of values, the rows' maxima in log2 units, and the sums of weights. A tile that a row does not see
    changes none of the row's.
    """
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    row_max = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)  # in log2 units
    row_sum = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], dtype=tl.float32)
    # One tile ahead, so that the pipeline copies keys and values without waiting for ids.
    next_ids = _block_ids(table_ptr, tiles_start, first_key, end_key, BLOCK_SIZE, TILE)
    for tile_start in range(tiles_start, end_key, TILE):
        positions = tile_start + tl.arange(0, TILE)  # [TILE]
        block_ids = next_ids.to(tl.int64)
        slots = positions % BLOCK_SIZE
        # A masked score is not enough: 0 * NaN = NaN, so neither K nor V of a slot without a key may be read.
        is_key = positions < end_key
        if HAS_WINDOW:
            is_key = is_key & (positions >= first_key)
        mask = is_key[:, None] & (dims < D)[None, :]
        key_ptrs = key_ptr + (block_ids * key_stride_block + slots * key_stride_slot)[:, None] + dims[None, :]
        value_ptrs = value_ptr + (block_ids * value_stride_block + slots * value_stride_slot)[:, None] + dims[None, :]
        key = tl.load(key_ptrs, mask=mask, other=0.0)  # [TILE, BLOCK_D]
        value = tl.load(value_ptrs, mask=mask, other=0.0)  # [TILE, BLOCK_D]
        next_ids = _block_ids(table_ptr, tile_start + TILE, first_key, end_key, BLOCK_SIZE, TILE)

        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")  # [BLOCK_ROWS, TILE]
        if IS_FP8:
            scale_at = block_ids * scale_stride_block + slots * scale_stride_slot
            scores *= tl.load(key_scale_ptr + scale_at, mask=is_key, other=0.0)[None, :]
        log2_scale = score_scale
        if SOFT_CAP > 0.0:
            scores = tanh(scores * score_scale) * (SOFT_CAP * _LOG2_E)
            log2_scale = 1.0
        is_edge = tile_start + TILE - 1 > first_position
        if HAS_WINDOW:
            is_edge = is_edge | (last_position - tile_start >= window)
        if is_edge:
            visible = positions[None, :] <= query_positions[:, None]
            if HAS_WINDOW:
                visible = visible & (query_positions[:, None] - positions[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * log2_scale)
        # For a row that has seen no key yet: compute exp2(-inf - x) = 0 instead of -inf - (-inf).
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores * log2_scale - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_max = new_max
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        if IS_FP8:
            # In units that keep float16 weights normal: a scale is a magnitude over 448.
            value_scales = tl.load(value_scale_ptr + scale_at, mask=is_key, other=0.0)
            weights *= (value_scales * _VALUE_UNITS)[None, :]
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(query.dtype), value.to(query.dtype), acc=acc, input_precision="ieee")

    if IS_FP8:
        acc *= 1.0 / _VALUE_UNITS
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["T", "S", "window", "min_query_len", "min_keys", "table_stride_sequence"])
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
    min_query_len,
    min_keys,  # of a short chunk, which `short_chunks` computes
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
    QUERY_IN_REGISTERS: tl.constexpr,
):
    """One program per (key-value head, block of queries)."""
    kv_head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    rows = tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    heads = kv_head * GROUP + rows % GROUP  # [BLOCK_ROWS]

    padding = tl.load(query_start_locs_ptr + S) + tl.program_id(1)
    zero_padding(
        out_ptr, padding, tl.num_programs(1), T, out_stride_token, out_stride_head, heads, rows < GROUP,
        D, BLOCK_D, BLOCK_ROWS,
    )  # fmt: skip

    # The last blocks of a prompt see the most keys, so they start first: those of all heads.
    query_block = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = find_sequence(query_start_locs_ptr, query_block, S, BLOCK_QUERIES)
    query_start = tl.load(query_start_locs_ptr + sequence)
    query_len = tl.load(query_start_locs_ptr + sequence + 1) - query_start
    first_query = (query_block - (query_start // BLOCK_QUERIES + sequence)) * BLOCK_QUERIES
    if (first_query >= query_len) | (query_len < min_query_len):
        return
    context_len = tl.load(context_lens_ptr + sequence)
    num_keys = visible_keys(query_len, context_len, window, HAS_WINDOW)
    if is_short_chunk(query_len, num_keys, min_query_len, min_keys):
        return

    queries = first_query + rows // GROUP  # [BLOCK_ROWS], in the sequence's new tokens
    query_positions = context_len - query_len + queries
    inside = (rows < BLOCK_QUERIES * GROUP) & (queries < query_len)
    tokens = (query_start + queries).to(tl.int64)

    first_position = context_len - query_len + first_query
    last_position = first_position + BLOCK_QUERIES - 1
    end_key = tl.minimum(last_position + 1, context_len)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position - window + 1, 0)
    tiles_start = first_key // TILE * TILE

    query_ptrs = query_ptr + tokens[:, None] * query_stride_token + heads[:, None] * query_stride_head + dims[None, :]
    query = tl.load(query_ptrs, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
    if QUERY_IN_REGISTERS:
        # The compiler leaves a computed operand in registers, where the product need not fetch it from shared memory.
        query = (query.to(tl.float32) * (score_scale * 0.0 + 1.0)).to(query.dtype)
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride_sequence
    key_ptr = key_cache_ptr + kv_head * key_stride_head
    value_ptr = value_cache_ptr + kv_head * value_stride_head
    key_scale_ptr = key_scales_ptr + kv_head * scale_stride_head
    value_scale_ptr = value_scales_ptr + kv_head * scale_stride_head

    acc, row_max, row_sum = attend_keys(
        query, query_positions, first_position, last_position, first_key, tiles_start, end_key,
        table_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, score_scale, window,
        key_stride_block, key_stride_slot, value_stride_block, value_stride_slot, scale_stride_block, scale_stride_slot,
        HAS_WINDOW, SOFT_CAP, IS_FP8, D, BLOCK_D, BLOCK_SIZE, BLOCK_ROWS, TILE,
    )  # fmt: skip
    out_ptrs = out_ptr + tokens[:, None] * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
    store_rows(out_ptrs, inside[:, None] & (dims < D)[None, :], acc, row_max, row_sum, sinks_ptr, heads, inside)
