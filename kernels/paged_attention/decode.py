# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Paged attention of decodes in Triton, split over the keys when contexts are long.

A program holds all new rows of a sequence that share a key-value head, padded to BLOCK_ROWS. Keys are split into
segments of a fixed number of tokens, one program each, and a second kernel merges them (Flash-Decoding). The split
depends only on positions, so the bits of a row depend only on its own query, keys and context, for any batch
composition.
"""

import torch
import triton
import triton.language as tl

from sluice.kernels.paged_attention.call import AttentionCall
from sluice.kernels.paged_attention.config import AttentionConfig
from sluice.kernels.paged_attention.tile import attend_keys, join_sinks, zero_padding


def attend_decodes(call: AttentionCall, config: AttentionConfig, *, segment_tokens: int) -> None:
    """Launch the kernel, and the merge if contexts may exceed a segment."""
    num_segments = triton.cdiv(call.max_context_len, segment_tokens)
    split = num_segments > 1
    partial, partial_max, partial_sum = call.out, call.out, call.out
    if split:
        sums = (call.num_tokens, call.num_heads, num_segments)
        device = call.query.device
        partial = torch.empty((*sums, call.kv_cache.head_size), dtype=torch.float32, device=device)
        partial_max = torch.empty(sums, dtype=torch.float32, device=device)
        partial_sum = torch.empty(sums, dtype=torch.float32, device=device)
    decode_kernel[(call.num_sequences, call.kv_cache.num_kv_heads, num_segments)](
        **call.arguments(),
        partial_ptr=partial,
        partial_max_ptr=partial_max,
        partial_sum_ptr=partial_sum,
        num_segments=num_segments,
        BLOCK_ROWS=config.block_rows,
        BLOCK_QUERIES=config.block_rows // call.group,
        TILE=config.tile,
        SEGMENT=segment_tokens,
        SPLIT=split,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if split:
        merge_kernel[(call.num_tokens, call.num_heads)](
            call.out,
            partial,
            partial_max,
            partial_sum,
            call.query_start_locs,
            call.sinks,
            call.num_sequences,
            num_segments,
            call.out.stride(0),
            call.out.stride(1),
            H=call.num_heads,
            D=call.kv_cache.head_size,
            BLOCK_D=triton.next_power_of_2(call.kv_cache.head_size),
            BLOCK_SEGMENTS=min(16, triton.next_power_of_2(num_segments)),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["T", "S", "num_segments", "window", "table_stride_sequence"])
def decode_kernel(
    out_ptr,  # [T, H, D]; unused when SPLIT
    partial_ptr,  # [T, H, num_segments, D] float32; used when SPLIT
    partial_max_ptr,  # [T, H, num_segments] float32; used when SPLIT
    partial_sum_ptr,  # [T, H, num_segments] float32; used when SPLIT
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
    num_segments,
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
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program per (sequence, key-value head, segment of keys)."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2)
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    rows = tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    heads = kv_head * GROUP + rows % GROUP  # [BLOCK_ROWS]

    if not SPLIT:
        padding = tl.load(query_start_locs_ptr + S) + sequence
        zero_padding(
            out_ptr, padding, tl.num_programs(0), T, out_stride_token, out_stride_head, heads, rows < GROUP,
            D, BLOCK_D, BLOCK_ROWS,
        )  # fmt: skip

    query_start = tl.load(query_start_locs_ptr + sequence)
    query_len = tl.load(query_start_locs_ptr + sequence + 1) - query_start
    if query_len <= 0:
        return
    context_len = tl.load(context_lens_ptr + sequence)

    queries = rows // GROUP  # [BLOCK_ROWS], in the sequence's new tokens
    query_positions = context_len - query_len + queries
    inside = (rows < BLOCK_QUERIES * GROUP) & (queries < query_len)
    tokens = (query_start + queries).to(tl.int64)

    first_position = context_len - query_len
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position - window + 1, 0)
    tiles_start = first_key // TILE * TILE
    tiles_end = context_len
    if SPLIT:
        tiles_start = tl.maximum(tiles_start, segment * SEGMENT)
        tiles_end = tl.minimum(tiles_end, (segment + 1) * SEGMENT)

    query_ptrs = query_ptr + tokens[:, None] * query_stride_token + heads[:, None] * query_stride_head + dims[None, :]
    query = tl.load(query_ptrs, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
    acc, row_max, row_sum = attend_keys(
        query, query_positions, tiles_start, tiles_end, first_position, first_key, context_len,
        block_tables_ptr + sequence.to(tl.int64) * table_stride_sequence,
        key_cache_ptr + kv_head * key_stride_head,
        value_cache_ptr + kv_head * value_stride_head,
        key_scales_ptr + kv_head * scale_stride_head,
        value_scales_ptr + kv_head * scale_stride_head,
        key_stride_block, key_stride_slot, value_stride_block, value_stride_slot,
        scale_stride_block, scale_stride_slot, score_scale,
        window, HAS_WINDOW, SOFT_CAP, IS_FP8, D, BLOCK_D, BLOCK_SIZE, BLOCK_ROWS, TILE,
    )  # fmt: skip

    if SPLIT:
        # Mark an empty segment: the merge reads only the weights of segments that have a maximum.
        partial_rows = (tokens * H + heads) * num_segments + segment
        tl.store(partial_max_ptr + partial_rows, row_max, mask=inside)
        tl.store(partial_sum_ptr + partial_rows, row_sum, mask=inside)
        if tiles_start < tiles_end:
            partial_ptrs = partial_ptr + partial_rows[:, None] * D + dims[None, :]
            tl.store(partial_ptrs, acc, mask=inside[:, None] & (dims < D)[None, :])
    else:
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + heads, mask=inside, other=0.0)
            rescale, row_sum = join_sinks(row_max, row_sum, sinks)
            acc *= rescale[:, None]
        # A row without a visible key (padding) has sum 0 and becomes 0.
        out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        out_ptrs = out_ptr + tokens[:, None] * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (dims < D)[None, :])


@triton.jit(do_not_specialize=["S", "num_segments"])
def merge_kernel(
    out_ptr,  # [T, H, D]
    partial_ptr,  # [T, H, num_segments, D] float32
    partial_max_ptr,  # [T, H, num_segments] float32, in log2 units
    partial_sum_ptr,  # [T, H, num_segments] float32
    query_start_locs_ptr,  # [S + 1] int32
    sinks_ptr,  # [H] float32, or None
    S,
    num_segments,
    out_stride_token,
    out_stride_head,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
):
    """One program per (token, head): the segments' sums, rescaled to their common maximum and divided."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    # Scalar offsets go to the pointers, not into the blocks of offsets: triton 3.5 and 3.6 miscompile the latter.
    row = (token * H + head) * num_segments
    partial_ptr += row * D
    partial_max_ptr += row
    partial_sum_ptr += row
    out_ptr += token * out_stride_token + head * out_stride_head
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]

    num_tokens = tl.load(query_start_locs_ptr + S)
    # Padding tokens have no segments: the loop does not run, and zeros are written.
    end_segment = tl.where(token < num_tokens, num_segments, 0)

    total_max = tl.full([1], float("-inf"), dtype=tl.float32)
    total_sum = tl.zeros([1], dtype=tl.float32)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(0, end_segment, BLOCK_SEGMENTS):
        segments = start + tl.arange(0, BLOCK_SEGMENTS)  # [BLOCK_SEGMENTS]
        maxima = tl.load(partial_max_ptr + segments, mask=segments < num_segments, other=float("-inf"))
        has_keys = maxima > float("-inf")
        sums = tl.load(partial_sum_ptr + segments, mask=has_keys, other=0.0)
        partial_ptrs = partial_ptr + segments[:, None] * D + dims[None, :]
        partials = tl.load(partial_ptrs, mask=has_keys[:, None] & (dims < D)[None, :], other=0.0)

        new_max = tl.maximum(total_max, tl.max(maxima, axis=0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(maxima - shift)
        rescale = tl.exp2(total_max - shift)
        total_sum = total_sum * rescale + tl.sum(sums * weights, axis=0)
        acc = acc * rescale + tl.sum(partials * weights[:, None], axis=0)
        total_max = new_max

    if sinks_ptr is not None:
        # Only here: each segment's sum is of keys alone.
        rescale, total_sum = join_sinks(total_max, total_sum, tl.load(sinks_ptr + head))
        acc *= rescale
    out = acc / tl.where(total_sum == 0.0, 1.0, total_sum)
    tl.store(out_ptr + dims, out.to(out_ptr.dtype.element_ty), mask=dims < D)
