# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Device functions of paged attention that decode and prefill share: a walk over keys in tiles, sinks, padding."""

import triton
import triton.language as tl

from sluice.kernels.tanh.kernel import tanh

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
_LARGEST_SINK = tl.constexpr(1e30)
_VALUE_UNITS = tl.constexpr(256.0)


@triton.jit
def join_sinks(row_max, row_sum, sinks):
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


@triton.jit
def attend_keys(
    query,  # [BLOCK_ROWS, BLOCK_D]
    query_positions,  # [BLOCK_ROWS]
    tiles_start,
    tiles_end,
    first_position,  # of the rows
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
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend to the keys from `tiles_start` to `tiles_end` of one head, in tiles.

    Returns the rows' weighted sums of values, maxima (in log2 units) and sums of weights.
    """
    row_max = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], dtype=tl.float32)

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
    return acc, row_max, row_sum


@triton.jit
def zero_padding(
    out_ptr,  # [T, H, D]
    first,
    step,
    T,
    out_stride_token,
    out_stride_head,
    heads,  # [BLOCK_ROWS]
    is_head,  # [BLOCK_ROWS]
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Write zeros to row `first` and every `step`-th after it: padding is never left stale."""
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    padding = first.to(tl.int64)
    while padding < T:
        padding_ptrs = out_ptr + padding * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
        zeros = tl.zeros([BLOCK_ROWS, BLOCK_D], dtype=out_ptr.dtype.element_ty)
        tl.store(padding_ptrs, zeros, mask=is_head[:, None] & (dims < D)[None, :])
        padding += step
