# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Paged attention in Triton: one kernel for prefill chunks and decodes, split over the keys when contexts are long.

A program holds BLOCK_ROWS query rows of one key-value head: the heads that share it, of BLOCK_QUERIES consecutive
tokens of one sequence (grouped-query attention packed into the rows, as in vLLM's Triton backend and FlashInfer). It
walks the sequence's keys in tiles of TILE tokens, looked up in the block table, with an online softmax in float32 (Dao,
FlashAttention-2, 2023). Tiles that are fully visible to every row need no mask and run in a separate loop.

When no sequence has more rows than one program holds (decode), keys are split into segments of a fixed number of
tokens, one program each, and a second kernel merges them (Flash-Decoding). The split depends only on positions, so the
bits of a decode's row depend only on its own query, keys and context, for any batch composition.

Nothing here reads a tensor on the host, so a launch can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.paged_attention.fp8 import FP8
from sluice.kernels.paged_attention.layout import KVCache, Layout
from sluice.kernels.tanh.kernel import tanh
from sluice.kernels.tuned import key_of, tuned

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
_LARGEST_SINK = tl.constexpr(1e30)
_VALUE_UNITS = tl.constexpr(256.0)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Tiling of one launch. It determines the bits of the result."""

    block_rows: int
    """Query rows (tokens times heads of a group) per program."""

    tile: int
    """Keys per step of the inner loop."""

    num_warps: int
    num_stages: int


SEGMENT_TOKENS = 512
"""Keys per program of a split decode: a multiple of every tile."""


def attention_config(
    *, element_bytes: int, head_size: int, group: int, max_query_len: int, is_fp8: bool = False
) -> AttentionConfig:
    """Choose the tiling from dtype, head size, heads per key-value head and phase, never from the number of sequences.

    The numbers keep every case free of register spills on sm_90, and decodes at two tiles in flight. A tile is loaded
    through its block ids, so the pipeline needs two additional stages per tile in flight. A cache in fp8 is widened in
    registers, which takes more of them: more warps or a smaller tile.
    """
    least_rows = max(16, triton.next_power_of_2(group))
    num_rows = triton.next_power_of_2(max_query_len * group)
    row_bytes = element_bytes * triton.next_power_of_2(head_size)
    if element_bytes == 4:
        return AttentionConfig(max(least_rows, min(num_rows, 32)), tile=16, num_warps=8, num_stages=2)
    tile = 64 if row_bytes <= 256 else 32
    if num_rows <= 32:
        return AttentionConfig(max(least_rows, num_rows), tile, num_warps=4, num_stages=5)
    if num_rows <= 64:
        return AttentionConfig(
            max(least_rows, 64), tile, num_warps=4 if row_bytes <= 256 and not is_fp8 else 8, num_stages=3
        )
    if is_fp8 and row_bytes > 256:
        return AttentionConfig(max(least_rows, 64), tile=16, num_warps=8, num_stages=3)
    return AttentionConfig(max(least_rows, 128), tile, num_warps=8, num_stages=3)


def launch_key(*, element_bytes: int, head_size: int, group: int, max_query_len: int, is_fp8: bool = False) -> str:
    """Return the table key of a configuration: the phase counts only by rows per sequence, up to a large block."""
    num_rows = min(triton.next_power_of_2(max_query_len * group), 128)
    return key_of(bytes=element_bytes, head=head_size, group=group, rows=num_rows, fp8=int(is_fp8))


def _chosen_config(query: Tensor, kv_cache: KVCache, group: int, max_query_len: int) -> AttentionConfig:
    """Return the configuration measured on this GPU for such a launch, or the rules' choice."""
    kind = {
        "element_bytes": query.element_size(),
        "head_size": kv_cache.head_size,
        "group": group,
        "max_query_len": max_query_len,
        "is_fp8": kv_cache.is_fp8,
    }
    measured = tuned(query.device, "paged_attention", launch_key(**kind))
    return attention_config(**kind) if measured is None else AttentionConfig(*measured)


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


@triton.jit
def _join_sinks(row_max, row_sum, sinks):
    """Include each row's sink in the softmax of its keys.

    Returns the factor on the rows' sums and the resulting sum of weights; 0 for a row without keys, as before.
    `row_max` is in log2 units, `sinks` are logits.
    """
    # A sink this large leaves no weight to the keys; a larger one would be infinite in log2 units.
    log2_sinks = tl.where(sinks > _LARGEST_SINK, _LARGEST_SINK, sinks) * _LOG2_E
    new_max = tl.maximum(row_max, log2_sinks)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - shift)
    total = row_sum * rescale + tl.exp2(log2_sinks - shift)
    return rescale, tl.where(row_sum == 0.0, 0.0, total)


@triton.jit
def _attend_tile(
    acc,  # [BLOCK_ROWS, BLOCK_D] float32
    row_max,  # [BLOCK_ROWS] float32, in log2 units
    row_sum,  # [BLOCK_ROWS] float32
    query,  # [BLOCK_ROWS, BLOCK_D]
    query_positions,  # [BLOCK_ROWS]
    tile_start,
    first_key,
    end_key,
    table_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    key_stride_block,
    key_stride_slot,
    value_stride_block,
    value_stride_slot,
    scale_stride_block,
    scale_stride_slot,
    score_scale,
    window,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the keys `tile_start` … `tile_start + TILE` into the running softmax."""
    positions = tile_start + tl.arange(0, TILE)  # [TILE]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    readable = (positions >= first_key) & (positions < end_key)

    if MASKED:
        block_ids = tl.load(table_ptr + positions // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
    else:
        block_ids = tl.load(table_ptr + positions // BLOCK_SIZE).to(tl.int64)
    slots = positions % BLOCK_SIZE
    key_ptrs = key_ptr + (block_ids * key_stride_block + slots * key_stride_slot)[None, :] + dims[:, None]
    value_ptrs = value_ptr + (block_ids * value_stride_block + slots * value_stride_slot)[:, None] + dims[None, :]

    # A masked score is not enough: 0 * NaN = NaN, so neither K nor V of a slot without a key may be read.
    if MASKED:
        key = tl.load(key_ptrs, mask=readable[None, :] & (dims < D)[:, None], other=0.0)  # [BLOCK_D, TILE]
        value = tl.load(value_ptrs, mask=readable[:, None] & (dims < D)[None, :], other=0.0)  # [TILE, BLOCK_D]
    elif D == BLOCK_D:
        key = tl.load(key_ptrs)
        value = tl.load(value_ptrs)
    else:
        key = tl.load(key_ptrs, mask=(dims < D)[:, None], other=0.0)
        value = tl.load(value_ptrs, mask=(dims < D)[None, :], other=0.0)

    scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * score_scale  # [BLOCK_ROWS, TILE]
    if IS_FP8:
        scale_at = block_ids * scale_stride_block + slots * scale_stride_slot
        scores *= tl.load(key_scale_ptr + scale_at, mask=readable, other=0.0)[None, :]
    if SOFT_CAP > 0.0:
        scores = tanh(scores) * (SOFT_CAP * _LOG2_E)
    if MASKED:
        visible = readable[None, :] & (positions[None, :] <= query_positions[:, None])
        if HAS_WINDOW:
            visible = visible & (query_positions[:, None] - positions[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # For a row that has seen no key yet: compute exp2(-inf - x) = 0 instead of -inf - (-inf).
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weights, axis=1)
    if IS_FP8:
        # In units that keep float16 weights normal: a scale is a magnitude over 448.
        value_scales = tl.load(value_scale_ptr + scale_at, mask=readable, other=0.0)
        weights *= (value_scales * _VALUE_UNITS)[None, :]
    value = value.to(query.dtype)
    acc = tl.dot(weights.to(query.dtype), value, acc=acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit(do_not_specialize=["T", "S", "num_segments", "window", "table_stride_sequence"])
def _paged_attention_kernel(
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
    ONE_BLOCK: tl.constexpr,
):
    """One program per (block of queries, key-value head, segment of keys)."""
    kv_head = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2)
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    rows = tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    heads = kv_head * GROUP + rows % GROUP  # [BLOCK_ROWS]

    if not SPLIT:
        # Tokens after the last query are padding: their rows are written as zeros, never left stale.
        padding = tl.load(query_start_locs_ptr + S).to(tl.int64) + tl.program_id(0)
        while padding < T:
            padding_ptrs = out_ptr + padding * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
            zeros = tl.zeros([BLOCK_ROWS, BLOCK_D], dtype=out_ptr.dtype.element_ty)
            tl.store(padding_ptrs, zeros, mask=(rows < GROUP)[:, None] & (dims < D)[None, :])
            padding += tl.num_programs(0)

    if ONE_BLOCK:
        sequence = tl.program_id(0)
        block_in_sequence = 0
    else:
        # The last blocks of a prompt see the most keys, so they start first.
        query_block = tl.num_programs(0) - 1 - tl.program_id(0)
        sequence = _find_sequence(query_start_locs_ptr, query_block, S, BLOCK_QUERIES)
        block_in_sequence = query_block - (tl.load(query_start_locs_ptr + sequence) // BLOCK_QUERIES + sequence)

    query_start = tl.load(query_start_locs_ptr + sequence)
    query_len = tl.load(query_start_locs_ptr + sequence + 1) - query_start
    first_query = block_in_sequence * BLOCK_QUERIES
    if first_query >= query_len:
        return
    context_len = tl.load(context_lens_ptr + sequence)

    queries = first_query + rows // GROUP  # [BLOCK_ROWS], in the sequence's new tokens
    query_positions = context_len - query_len + queries
    inside = (rows < BLOCK_QUERIES * GROUP) & (queries < query_len)
    tokens = (query_start + queries).to(tl.int64)

    first_position = context_len - query_len + first_query
    last_position = tl.minimum(first_position + BLOCK_QUERIES, context_len) - 1
    end_key = last_position + 1
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position - window + 1, 0)
    tiles_start = first_key // TILE * TILE
    tiles_end = end_key
    if SPLIT:
        tiles_start = tl.maximum(tiles_start, segment * SEGMENT)
        tiles_end = tl.minimum(tiles_end, (segment + 1) * SEGMENT)

    row_max = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], dtype=tl.float32)

    if tiles_start < tiles_end:
        query_ptrs = (
            query_ptr + tokens[:, None] * query_stride_token + heads[:, None] * query_stride_head + dims[None, :]
        )
        query = tl.load(query_ptrs, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
        table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride_sequence
        key_ptr = key_cache_ptr + kv_head * key_stride_head
        value_ptr = value_cache_ptr + kv_head * value_stride_head
        key_scale_ptr = key_scales_ptr + kv_head * scale_stride_head
        value_scale_ptr = value_scales_ptr + kv_head * scale_stride_head

        masked_start = tiles_start
        if not HAS_WINDOW:
            # Every row sees whole tiles up to the first query's own position.
            masked_start = tl.maximum(tl.minimum(first_position + 1, tiles_end) // TILE * TILE, tiles_start)
            for tile_start in range(tiles_start, masked_start, TILE):
                acc, row_max, row_sum = _attend_tile(
                    acc, row_max, row_sum, query, query_positions, tile_start, first_key, end_key,
                    table_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
                    key_stride_block, key_stride_slot, value_stride_block, value_stride_slot,
                    scale_stride_block, scale_stride_slot, score_scale,
                    window, HAS_WINDOW, SOFT_CAP, IS_FP8, D, BLOCK_D, BLOCK_SIZE, TILE, MASKED=False,
                )  # fmt: skip
        for tile_start in range(masked_start, tiles_end, TILE):
            acc, row_max, row_sum = _attend_tile(
                acc, row_max, row_sum, query, query_positions, tile_start, first_key, end_key,
                table_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
                key_stride_block, key_stride_slot, value_stride_block, value_stride_slot,
                scale_stride_block, scale_stride_slot, score_scale,
                window, HAS_WINDOW, SOFT_CAP, IS_FP8, D, BLOCK_D, BLOCK_SIZE, TILE, MASKED=True,
            )  # fmt: skip

    if IS_FP8:
        acc *= 1.0 / _VALUE_UNITS

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
            rescale, row_sum = _join_sinks(row_max, row_sum, sinks)
            acc *= rescale[:, None]
        # A row without a visible key (padding) has sum 0 and becomes 0.
        out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        out_ptrs = out_ptr + tokens[:, None] * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (dims < D)[None, :])


@triton.jit(do_not_specialize=["S", "num_segments"])
def _merge_segments_kernel(
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
        rescale, total_sum = _join_sinks(total_max, total_sum, tl.load(sinks_ptr + head))
        acc *= rescale
    out = acc / tl.where(total_sum == 0.0, 1.0, total_sum)
    tl.store(out_ptr + dims, out.to(out_ptr.dtype.element_ty), mask=dims < D)


def allocate_cuda(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Make one layer's cache of zeros, `[blocks, 2, G, block_size, D]` in memory, as `Layout.PLAIN` views.

    One head's keys of a block are contiguous, which is what one program reads; so is a whole block with keys and
    values, which is what a copy moves.
    """
    memory = torch.zeros((num_blocks, 2, num_kv_heads, block_size, head_size), dtype=dtype, device=device)
    keys, values = memory.transpose(2, 3).unbind(dim=1)  # [blocks, block_size, G, D] each
    key_scales = value_scales = None
    if dtype == FP8:
        scales = torch.zeros((num_blocks, 2, num_kv_heads, block_size), dtype=torch.float32, device=device)
        key_scales, value_scales = scales.transpose(2, 3).unbind(dim=1)  # [blocks, block_size, G] each
    return KVCache(
        keys=keys,
        values=values,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layout=Layout.PLAIN,
        key_scales=key_scales,
        value_scales=value_scales,
    )


def paged_attention_triton(
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
    out: Tensor,
    config: AttentionConfig | None = None,
) -> None:
    """Launch the kernel; `config` overrides the table's choice. See `kernels.paged_attention.paged_attention`."""
    num_tokens, num_heads, head_size = query.shape
    num_sequences = context_lens.shape[0]
    if num_tokens == 0:
        return
    if num_sequences == 0:
        out.zero_()
        return
    keys, values = kv_cache.keys, kv_cache.values
    key_scales, value_scales = kv_cache.key_scales, kv_cache.value_scales
    if key_scales is None or value_scales is None:
        key_scales = value_scales = context_lens.view(-1, 1, 1)  # unused
    group = num_heads // kv_cache.num_kv_heads
    if config is None:
        config = _chosen_config(query, kv_cache, group, max_query_len)
    block_queries = config.block_rows // group
    one_block = max_query_len <= block_queries
    num_segments = triton.cdiv(max_context_len, SEGMENT_TOKENS) if one_block else 1
    split = num_segments > 1
    num_query_blocks = num_sequences if one_block else num_tokens // block_queries + num_sequences
    partial, partial_max, partial_sum = out, out, out
    if split:
        sums = (num_tokens, num_heads, num_segments)
        partial = torch.empty((*sums, head_size), dtype=torch.float32, device=query.device)
        partial_max = torch.empty(sums, dtype=torch.float32, device=query.device)
        partial_sum = torch.empty(sums, dtype=torch.float32, device=query.device)
    _paged_attention_kernel[(num_query_blocks, kv_cache.num_kv_heads, num_segments)](
        out,
        partial,
        partial_max,
        partial_sum,
        query,
        keys,
        values,
        block_tables,
        query_start_locs,
        context_lens,
        key_scales,
        value_scales,
        sinks,
        scale / soft_cap if soft_cap else scale * LOG2_E,
        num_tokens,
        num_sequences,
        num_segments,
        sliding_window,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(2),
        keys.stride(1),
        values.stride(0),
        values.stride(2),
        values.stride(1),
        key_scales.stride(0),
        key_scales.stride(2),
        key_scales.stride(1),
        block_tables.stride(0),
        HAS_WINDOW=sliding_window > 0,
        SOFT_CAP=float(soft_cap),
        IS_FP8=kv_cache.is_fp8,
        H=num_heads,
        GROUP=group,
        D=head_size,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)),
        BLOCK_SIZE=kv_cache.block_size,
        BLOCK_ROWS=config.block_rows,
        BLOCK_QUERIES=block_queries,
        TILE=config.tile,
        SEGMENT=SEGMENT_TOKENS,
        SPLIT=split,
        ONE_BLOCK=one_block,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if split:
        _merge_segments_kernel[(num_tokens, num_heads)](
            out,
            partial,
            partial_max,
            partial_sum,
            query_start_locs,
            sinks,
            num_sequences,
            num_segments,
            out.stride(0),
            out.stride(1),
            H=num_heads,
            D=head_size,
            BLOCK_D=triton.next_power_of_2(head_size),
            BLOCK_SEGMENTS=min(16, triton.next_power_of_2(num_segments)),
            num_warps=4,
        )
