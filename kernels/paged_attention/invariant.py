# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Paged attention in Triton whose bits for a token depend on its query, keys and position alone.

The keys are divided into segments at fixed positions, short ones first. A row's result is that of each segment, joined
in their order. Who computes the segments changes no bit: each of a decode is an item, so that many programs share a
long context, and `merge_kernel` joins them; a block of a chunk's queries walks all of its segments and joins them at
once. So it matters neither whether a token is a decode, a draft or part of a chunk, nor what else is in the step.

Both are the same compiled kernel with the same tiles, and products are never fused with sums: otherwise the compiler
could round differently in the two kernels that join segments. The configuration is a pure function of the model.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.checks import check
from sluice.kernels.paged_attention.call import AttentionCall
from sluice.kernels.paged_attention.config import AttentionConfig, invariant_config
from sluice.kernels.paged_attention.decode import num_programs
from sluice.kernels.paged_attention.prefill import attend_keys
from sluice.kernels.paged_attention.tile import join_sinks, joined, sequence_of, store_rows

SEGMENT_TOKENS = 256
"""Keys of each of the first segments: a multiple of every tile. It determines the bits of the result.

Shorter ones occupy more programs with one short context, and take more memory between the two kernels.
"""

SHORT_SEGMENTS = 16
"""First segments; those after them have four times as many keys. It determines the bits, too."""

_WARPS_PER_PROCESSOR = 8
"""As many as their registers allow."""


def paged_attention_invariant(call: AttentionCall) -> None:
    """Launch the kernels; see `kernels.paged_attention.paged_attention`."""
    config = invariant_config(
        element_bytes=call.query.element_size(),
        head_size=call.kv_cache.head_size,
        group=call.group,
        is_fp8=call.kv_cache.is_fp8,
    )
    check(SEGMENT_TOKENS % config.tile == 0, "segments are not whole tiles of {}", config.tile)
    partial, partial_max, partial_sum = _allocate_partials(call, config)
    num_sequences, max_segments = partial_sum.shape[:2]
    block_queries = config.block_rows // call.group
    max_items = call.num_tokens // block_queries + num_sequences * (1 + max_segments)
    programs = num_programs(call.query.device, _WARPS_PER_PROCESSOR // config.num_warps)
    segments = {"max_segments": max_segments, "SEGMENT": SEGMENT_TOKENS, "NUM_SHORT": SHORT_SEGMENTS}
    attend_kernel[(min(max_items * call.kv_cache.num_kv_heads, programs),)](
        **call.arguments(),
        **call.cache_strides(),
        **segments,
        partial_ptr=partial,
        partial_max_ptr=partial_max,
        partial_sum_ptr=partial_sum,
        G=call.kv_cache.num_kv_heads,
        BLOCK_ROWS=config.block_rows,
        BLOCK_QUERIES=block_queries,
        TILE=config.tile,
        BLOCK_S=32 if num_sequences <= 32 else max(256, triton.next_power_of_2(num_sequences)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    merge_kernel[(num_sequences, call.num_heads)](
        call.out,
        partial,
        partial_max,
        partial_sum,
        call.query_start_locs,
        call.context_lens,
        call.sinks,
        call.num_tokens,
        num_sequences,
        window=call.sliding_window,
        out_stride_token=call.out.stride(0),
        out_stride_head=call.out.stride(1),
        HAS_WINDOW=call.sliding_window > 0,
        H=call.num_heads,
        D=call.kv_cache.head_size,
        BLOCK_D=triton.next_power_of_2(call.kv_cache.head_size),
        **segments,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _allocate_partials(call: AttentionCall, config: AttentionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Make memory for decodes: sums of values `[S, segments, H, D]`, maxima and sums of weights `[S, segments, H]`."""
    num_long_keys = max(call.max_context_len - SHORT_SEGMENTS * SEGMENT_TOKENS, 0)
    num_short_keys = call.max_context_len - num_long_keys
    max_segments = triton.cdiv(num_short_keys, SEGMENT_TOKENS) + triton.cdiv(num_long_keys, 4 * SEGMENT_TOKENS)
    if call.sliding_window:
        max_segments = min(max_segments, triton.cdiv(call.sliding_window + config.tile, SEGMENT_TOKENS) + 1)
    shape = (call.num_sequences, max(max_segments, 1), call.num_heads)
    device = call.query.device
    partial = torch.empty((*shape, call.kv_cache.head_size), dtype=torch.float32, device=device)
    partial_max, partial_sum = torch.empty((2, *shape), dtype=torch.float32, device=device)
    return partial, partial_max, partial_sum


@triton.jit
def _segments_before(key, SEGMENT: tl.constexpr, NUM_SHORT: tl.constexpr):
    """Return how many segments begin before a position."""
    num_long_keys = tl.maximum(key - NUM_SHORT * SEGMENT, 0)
    return tl.cdiv(key - num_long_keys, SEGMENT) + tl.cdiv(num_long_keys, 4 * SEGMENT)


@triton.jit
def _segment_start(number, SEGMENT: tl.constexpr, NUM_SHORT: tl.constexpr):
    """Return the first position of a segment."""
    return (number + 3 * tl.maximum(number - NUM_SHORT, 0)) * SEGMENT


@triton.jit
def _first_segment(context_len, window, HAS_WINDOW: tl.constexpr, SEGMENT: tl.constexpr, NUM_SHORT: tl.constexpr):
    """Return the first segment with a key that a decode sees."""
    if HAS_WINDOW:
        return _segments_before(tl.maximum(context_len - window, 0) + 1, SEGMENT, NUM_SHORT) - 1
    else:
        return context_len * 0


@triton.jit(do_not_specialize=["T", "S", "max_segments", "window", "table_stride_sequence"])
def attend_kernel(
    out_ptr,  # [T, H, D]
    partial_ptr,  # [S, max_segments, H, D] float32
    partial_max_ptr,  # [S, max_segments, H] float32, in log2 units
    partial_sum_ptr,  # [S, max_segments, H] float32
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
    T,  # unused
    S,
    max_segments,
    window,  # unused unless HAS_WINDOW
    out_stride_token,
    out_stride_head,
    query_stride_token,
    query_stride_head,
    key_stride_block: tl.constexpr,
    key_stride_head: tl.constexpr,
    key_stride_slot: tl.constexpr,
    value_stride_block: tl.constexpr,
    value_stride_head: tl.constexpr,
    value_stride_slot: tl.constexpr,
    scale_stride_block: tl.constexpr,
    scale_stride_head: tl.constexpr,
    scale_stride_slot: tl.constexpr,
    table_stride_sequence,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # 0.0: none
    IS_FP8: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_SHORT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each program computes every `tl.num_programs(0)`-th item of a head: a decode's segment or a block of queries."""
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    rows = tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]

    sequences = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    query_starts = tl.load(query_start_locs_ptr + sequences, mask=sequences < S, other=0)
    query_lens = tl.load(query_start_locs_ptr + sequences + 1, mask=sequences < S, other=0) - query_starts
    contexts = tl.load(context_lens_ptr + sequences, mask=sequences < S, other=0)
    num_segments = _segments_before(contexts, SEGMENT, NUM_SHORT)
    num_segments -= _first_segment(contexts, window, HAS_WINDOW, SEGMENT, NUM_SHORT)
    counts = tl.where(query_lens == 1, num_segments, tl.cdiv(query_lens, BLOCK_QUERIES))
    items_end = tl.cumsum(counts, axis=0)  # [BLOCK_S]: items of a head of the sequences up to and including each
    num_items = tl.sum(counts, axis=0) * G

    item = tl.program_id(0)
    for _ in range(tl.cdiv(num_items - item, tl.num_programs(0))):
        kv_head = (item % G).to(tl.int64)
        sequence, number = sequence_of(item // G, items_end, S)
        query_start = tl.load(query_start_locs_ptr + sequence)
        query_len = tl.load(query_start_locs_ptr + sequence + 1) - query_start
        context_len = tl.load(context_lens_ptr + sequence)
        is_decode = query_len == 1

        heads = kv_head * GROUP + rows % GROUP  # [BLOCK_ROWS]
        first_query = tl.where(is_decode, 0, number * BLOCK_QUERIES)
        queries = first_query + rows // GROUP  # [BLOCK_ROWS], in the sequence's new tokens
        inside = (rows < BLOCK_QUERIES * GROUP) & (queries < query_len)
        query_positions = context_len - query_len + queries
        tokens = (query_start + queries).to(tl.int64)
        query_ptrs = query_ptr + tokens[:, None] * query_stride_token + heads[:, None] * query_stride_head
        query = tl.load(query_ptrs + dims[None, :], mask=inside[:, None] & (dims < D)[None, :], other=0.0)

        first_position = context_len - query_len + first_query
        last_position = first_position + BLOCK_QUERIES - 1
        end_key = tl.minimum(last_position + 1, context_len)
        first_key = 0
        if HAS_WINDOW:
            first_key = tl.maximum(first_position - window + 1, 0)
        segments_start = _segments_before(first_key + 1, SEGMENT, NUM_SHORT) - 1 + tl.where(is_decode, number, 0)
        segments_end = tl.where(is_decode, segments_start + 1, _segments_before(end_key, SEGMENT, NUM_SHORT))
        table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride_sequence
        key_ptr = key_cache_ptr + kv_head * key_stride_head
        value_ptr = value_cache_ptr + kv_head * value_stride_head
        key_scale_ptr = key_scales_ptr + kv_head * scale_stride_head
        value_scale_ptr = value_scales_ptr + kv_head * scale_stride_head

        total_max = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)  # in log2 units
        total_sum = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
        total = tl.zeros([BLOCK_ROWS, BLOCK_D], dtype=tl.float32)
        for segment in range(segments_start, segments_end):
            acc, row_max, row_sum = attend_keys(
                query, query_positions, first_position, last_position, first_key,
                tl.maximum(_segment_start(segment, SEGMENT, NUM_SHORT), first_key // TILE * TILE),
                tl.minimum(_segment_start(segment + 1, SEGMENT, NUM_SHORT), end_key),
                table_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, score_scale, window,
                key_stride_block, key_stride_slot, value_stride_block, value_stride_slot,
                scale_stride_block, scale_stride_slot,
                HAS_WINDOW, SOFT_CAP, IS_FP8, D, BLOCK_D, BLOCK_SIZE, BLOCK_ROWS, TILE,
            )  # fmt: skip
            total, total_max, total_sum = joined(total, total_max, total_sum, acc, row_max, row_sum)

        mask = inside[:, None] & (dims < D)[None, :]
        if is_decode:
            partial_rows = (sequence.to(tl.int64) * max_segments + number) * H + heads
            tl.store(partial_ptr + partial_rows[:, None] * D + dims[None, :], total, mask=mask)
            tl.store(partial_max_ptr + partial_rows, total_max, mask=inside)
            tl.store(partial_sum_ptr + partial_rows, total_sum, mask=inside)
        else:
            out_ptrs = out_ptr + tokens[:, None] * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
            store_rows(out_ptrs, mask, total, total_max, total_sum, sinks_ptr, heads, inside)
        item += tl.num_programs(0)


@triton.jit(do_not_specialize=["T", "S", "max_segments", "window"])
def merge_kernel(
    out_ptr,  # [T, H, D]
    partial_ptr,  # [S, max_segments, H, D] float32
    partial_max_ptr,  # [S, max_segments, H] float32, in log2 units
    partial_sum_ptr,  # [S, max_segments, H] float32
    query_start_locs_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    sinks_ptr,  # [H] float32, or None
    T,
    S,
    max_segments,
    window,
    out_stride_token,
    out_stride_head,
    HAS_WINDOW: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_SHORT: tl.constexpr,
):
    """One program per (sequence, head): a decode's segments joined in their order; and zeros to padding."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    query_start = tl.load(query_start_locs_ptr + sequence)
    query_len = tl.load(query_start_locs_ptr + sequence + 1) - query_start
    context_len = tl.load(context_lens_ptr + sequence)
    # Scalar offsets go to the pointers, not into the blocks of offsets: triton 3.5 and 3.6 miscompile the latter.
    out_ptr += head * out_stride_head

    padding = (tl.load(query_start_locs_ptr + S) + sequence).to(tl.int64)
    while padding < T:
        zeros = tl.zeros([BLOCK_D], out_ptr.dtype.element_ty)
        tl.store(out_ptr + padding * out_stride_token + dims, zeros, mask=dims < D)
        padding += S

    if query_len == 1:
        total_max = tl.full([1], float("-inf"), dtype=tl.float32)
        total_sum = tl.zeros([1], dtype=tl.float32)
        total = tl.zeros([1, BLOCK_D], dtype=tl.float32)
        row = sequence.to(tl.int64) * max_segments * H + head
        num_segments = _segments_before(context_len, SEGMENT, NUM_SHORT)
        num_segments -= _first_segment(context_len, window, HAS_WINDOW, SEGMENT, NUM_SHORT)
        for _ in range(num_segments):
            acc = tl.load(partial_ptr + row * D + dims, mask=dims < D, other=0.0)[None, :]
            row_max = tl.load(partial_max_ptr + row + tl.arange(0, 1))
            row_sum = tl.load(partial_sum_ptr + row + tl.arange(0, 1))
            total, total_max, total_sum = joined(total, total_max, total_sum, acc, row_max, row_sum)
            row += H

        if sinks_ptr is not None:
            # Only here: each segment's sum is of keys alone.
            rescale, total_sum = join_sinks(total_max, total_sum, tl.load(sinks_ptr + head + tl.arange(0, 1)))
            total *= rescale[:, None]
        out = total / tl.where(total_sum == 0.0, 1.0, total_sum)[:, None]
        out_ptrs = out_ptr + query_start.to(tl.int64) * out_stride_token + dims[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(dims < D)[None, :])
