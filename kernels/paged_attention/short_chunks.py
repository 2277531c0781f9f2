# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Paged attention of short prefill chunks over long contexts in Triton, split over the keys (Flash-Decoding).

An item is a segment of the keys of one block of queries of one key-value head. All segments of a call have one length,
computed on the device from the work of all short chunks, so that there are about as many items as programs run at a
time. A block with one segment is finished by its program; `join_kernel` joins the segments of the others. So the bits
of a row depend on the other short chunks of the step and on the number of processors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.paged_attention.call import AttentionCall, Chunks
from sluice.kernels.paged_attention.config import AttentionConfig
from sluice.kernels.paged_attention.prefill import attend_keys
from sluice.kernels.paged_attention.tile import is_short_chunk, joined, sequence_of, store_rows, visible_keys

_JOINED_ROWS = 16
"""Rows of a program that joins segments."""

_JOIN_ARGUMENTS = (
    "out_ptr", "query_start_locs_ptr", "context_lens_ptr", "sinks_ptr", "S", "window",
    "out_stride_token", "out_stride_head", "HAS_WINDOW", "GROUP", "D", "BLOCK_D",
)  # fmt: skip
"""What that program takes of a call."""


def attend_short_chunks(
    call: AttentionCall, config: AttentionConfig, chunks: Chunks, *, num_programs: int, min_segment_tokens: int
) -> None:
    """Launch the kernels for the short chunks of `chunks`.

    Args:
        call: all sequences.
        config: the tiling of a block of queries.
        chunks: which sequences have short chunks.
        num_programs: how many run at a time, over all heads: one per processor.
        min_segment_tokens: fewest keys of a segment, unless a block sees fewer; rounded up to whole tiles.
    """
    num_kv_heads = call.kv_cache.num_kv_heads
    items_per_head = max(num_programs // num_kv_heads, 1)
    partial, partial_max, partial_sum = _allocate_partials(call, config, items_per_head)
    arguments = call.arguments()
    shared = {
        **chunks.arguments(),
        "partial_ptr": partial,
        "partial_max_ptr": partial_max,
        "partial_sum_ptr": partial_sum,
        "items_per_head": items_per_head,
        "G": num_kv_heads,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_QUERIES": config.block_rows // call.group,
        "BLOCK_S": max(256, triton.next_power_of_2(call.num_sequences)),
        "TILE": config.tile,
        "MIN_SEGMENT": min_segment_tokens,
    }
    short_chunk_kernel[(num_programs,)](
        **arguments, **call.cache_strides(), **shared, num_warps=config.num_warps, num_stages=config.num_stages
    )
    join_kernel[(items_per_head * num_kv_heads, config.block_rows // _JOINED_ROWS)](
        **{name: arguments[name] for name in _JOIN_ARGUMENTS}, **shared, ROWS=_JOINED_ROWS, num_warps=4
    )


def _allocate_partials(
    call: AttentionCall, config: AttentionConfig, items_per_head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Make memory for the segments of divided blocks, by head: fewer than `2 * items_per_head`.

    A block of n > 1 segments has over n - 1 segments' keys, and the segments are so long that there are at most
    `items_per_head` segments' keys in all.
    """
    shape = (2 * items_per_head, call.kv_cache.num_kv_heads, config.block_rows)
    device = call.query.device
    partial = torch.empty((*shape, call.kv_cache.head_size), dtype=torch.float32, device=device)
    partial_max, partial_sum = torch.empty((2, *shape), dtype=torch.float32, device=device)
    return partial, partial_max, partial_sum


@triton.jit
def _divide(
    query_start_locs_ptr,
    context_lens_ptr,
    S,
    window,
    min_query_len,
    min_keys,
    items_per_head,
    HAS_WINDOW: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SEGMENT: tl.constexpr,
):
    """Return each sequence's blocks of queries and each such block's segments `[BLOCK_S]`, and a segment's keys."""
    sequences = tl.arange(0, BLOCK_S)
    query_starts = tl.load(query_start_locs_ptr + sequences, mask=sequences < S, other=0)
    query_lens = tl.load(query_start_locs_ptr + sequences + 1, mask=sequences < S, other=0) - query_starts
    contexts = tl.load(context_lens_ptr + sequences, mask=sequences < S, other=0)
    keys = visible_keys(query_lens, contexts, window, HAS_WINDOW)
    is_short = is_short_chunk(query_lens, keys, min_query_len, min_keys)
    if HAS_WINDOW:
        # A block's first tile may start before its first key.
        keys += TILE - 1
    blocks = tl.where(is_short, tl.cdiv(query_lens, BLOCK_QUERIES), 0)
    work = tl.sum(blocks.to(tl.int64) * keys, axis=0)
    segment_keys = tl.maximum((work + items_per_head - 1) // items_per_head, MIN_SEGMENT)
    segment_keys = ((segment_keys + TILE - 1) // TILE * TILE).to(tl.int32)
    return blocks, tl.where(is_short, (keys + segment_keys - 1) // segment_keys, 0), segment_keys


@triton.jit
def _of_sequence(values, sequence, BLOCK_S: tl.constexpr):
    """Return one of the values `[BLOCK_S]`."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_S) == sequence, values, 0), axis=0)


@triton.jit(
    do_not_specialize=[
        "T", "S", "window", "min_query_len", "min_keys", "items_per_head", "table_stride_sequence"
    ]
)  # fmt: skip
def short_chunk_kernel(
    out_ptr,  # [T, H, D]
    partial_ptr,  # [2 * items_per_head, G, BLOCK_ROWS, D] float32
    partial_max_ptr,  # [2 * items_per_head, G, BLOCK_ROWS] float32, in log2 units
    partial_sum_ptr,  # [2 * items_per_head, G, BLOCK_ROWS] float32
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
    window,  # unused unless HAS_WINDOW
    min_query_len,
    min_keys,
    items_per_head,
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
    H: tl.constexpr,  # unused
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SEGMENT: tl.constexpr,
):
    """Each program computes every `tl.num_programs(0)`-th item."""
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    rows = tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    blocks, segments, segment_keys = _divide(
        query_start_locs_ptr, context_lens_ptr, S, window, min_query_len, min_keys, items_per_head,
        HAS_WINDOW, BLOCK_QUERIES, BLOCK_S, TILE, MIN_SEGMENT,
    )  # fmt: skip
    items_end = tl.cumsum(blocks * segments, axis=0)  # [BLOCK_S]: items of a head
    partials = tl.where(segments > 1, blocks * segments, 0)
    partials_start = tl.cumsum(partials, axis=0) - partials
    num_items = tl.sum(blocks * segments, axis=0) * G

    item = tl.program_id(0)
    for _ in range(tl.cdiv(num_items - item, tl.num_programs(0))):
        kv_head = (item % G).to(tl.int64)
        sequence, number = sequence_of(item // G, items_end, S)
        num_segments = _of_sequence(segments, sequence, BLOCK_S)
        partial = _of_sequence(partials_start, sequence, BLOCK_S) + number
        segment = number % num_segments
        first_query = number // num_segments * BLOCK_QUERIES
        query_start = tl.load(query_start_locs_ptr + sequence)
        query_len = tl.load(query_start_locs_ptr + sequence + 1) - query_start
        context_len = tl.load(context_lens_ptr + sequence)

        heads = kv_head * GROUP + rows % GROUP  # [BLOCK_ROWS]
        queries = first_query + rows // GROUP  # [BLOCK_ROWS], in the sequence's new tokens
        inside = (rows < BLOCK_QUERIES * GROUP) & (queries < query_len)
        tokens = (query_start + queries).to(tl.int64)
        mask = inside[:, None] & (dims < D)[None, :]
        query_ptrs = query_ptr + tokens[:, None] * query_stride_token + heads[:, None] * query_stride_head
        query = tl.load(query_ptrs + dims[None, :], mask=mask, other=0.0)

        first_position = context_len - query_len + first_query
        last_position = first_position + BLOCK_QUERIES - 1
        first_key = 0
        if HAS_WINDOW:
            first_key = tl.maximum(first_position - window + 1, 0)
        tiles_start = first_key // TILE * TILE + segment * segment_keys
        end_key = tl.minimum(tl.minimum(last_position + 1, context_len), tiles_start + segment_keys)
        acc, row_max, row_sum = attend_keys(
            query, context_len - query_len + queries, first_position, last_position, first_key, tiles_start, end_key,
            block_tables_ptr + sequence.to(tl.int64) * table_stride_sequence,
            key_cache_ptr + kv_head * key_stride_head,
            value_cache_ptr + kv_head * value_stride_head,
            key_scales_ptr + kv_head * scale_stride_head,
            value_scales_ptr + kv_head * scale_stride_head,
            score_scale, window,
            key_stride_block, key_stride_slot, value_stride_block, value_stride_slot,
            scale_stride_block, scale_stride_slot,
            HAS_WINDOW, SOFT_CAP, IS_FP8, D, BLOCK_D, BLOCK_SIZE, BLOCK_ROWS, TILE,
        )  # fmt: skip
        if num_segments == 1:
            out_ptrs = out_ptr + tokens[:, None] * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
            store_rows(out_ptrs, mask, acc, row_max, row_sum, sinks_ptr, heads, inside)
        else:
            partial_rows = (partial * G + kv_head) * BLOCK_ROWS + rows
            tl.store(partial_ptr + partial_rows[:, None] * D + dims[None, :], acc, mask=mask)
            tl.store(partial_max_ptr + partial_rows, row_max, mask=inside)
            tl.store(partial_sum_ptr + partial_rows, row_sum, mask=inside)
        item += tl.num_programs(0)


@triton.jit(
    do_not_specialize=["S", "window", "min_query_len", "min_keys", "items_per_head"],
)
def join_kernel(
    out_ptr,  # [T, H, D]
    partial_ptr,  # [2 * items_per_head, G, BLOCK_ROWS, D] float32
    partial_max_ptr,  # [2 * items_per_head, G, BLOCK_ROWS] float32, in log2 units
    partial_sum_ptr,  # [2 * items_per_head, G, BLOCK_ROWS] float32
    query_start_locs_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    sinks_ptr,  # [H] float32, or None
    S,
    window,  # unused unless HAS_WINDOW
    min_query_len,
    min_keys,
    items_per_head,
    out_stride_token,
    out_stride_head,
    HAS_WINDOW: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per (block of queries with several segments and key-value head, ROWS of its rows)."""
    blocks, segments, _segment_keys = _divide(
        query_start_locs_ptr, context_lens_ptr, S, window, min_query_len, min_keys, items_per_head,
        HAS_WINDOW, BLOCK_QUERIES, BLOCK_S, TILE, MIN_SEGMENT,
    )  # fmt: skip
    divided = tl.where(segments > 1, blocks, 0)
    blocks_end = tl.cumsum(divided, axis=0)  # [BLOCK_S]
    number = tl.program_id(0) // G
    if number >= tl.sum(divided, axis=0):
        return
    sequence, block = sequence_of(number, blocks_end, S)
    num_segments = _of_sequence(segments, sequence, BLOCK_S)
    partials = divided * segments
    partial = _of_sequence(tl.cumsum(partials, axis=0) - partials, sequence, BLOCK_S) + block * num_segments
    query_start = tl.load(query_start_locs_ptr + sequence)
    query_len = tl.load(query_start_locs_ptr + sequence + 1) - query_start

    kv_head = (tl.program_id(0) % G).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    heads = kv_head * GROUP + rows % GROUP
    queries = block * BLOCK_QUERIES + rows // GROUP
    inside = (rows < BLOCK_QUERIES * GROUP) & (queries < query_len)
    mask = inside[:, None] & (dims < D)[None, :]
    total_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)  # in log2 units
    total_sum = tl.zeros([ROWS], dtype=tl.float32)
    total = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    partial_rows = (partial * G + kv_head) * BLOCK_ROWS + rows
    for _ in range(num_segments):
        acc = tl.load(partial_ptr + partial_rows[:, None] * D + dims[None, :], mask=mask, other=0.0)
        row_max = tl.load(partial_max_ptr + partial_rows, mask=inside, other=float("-inf"))
        row_sum = tl.load(partial_sum_ptr + partial_rows, mask=inside, other=0.0)
        total, total_max, total_sum = joined(total, total_max, total_sum, acc, row_max, row_sum)
        partial_rows += G * BLOCK_ROWS
    tokens = (query_start + queries).to(tl.int64)
    out_ptrs = out_ptr + tokens[:, None] * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
    store_rows(out_ptrs, mask, total, total_max, total_sum, sinks_ptr, heads, inside)
