# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Paged attention of sequences with few new tokens in Triton, split over the keys (Flash-Decoding).

The keys that a sequence sees are split into segments. Their size depends only on the sequence's own numbers of keys and
of new tokens. An item is a segment of one key-value head: all new rows of the sequence that share the head, padded to
BLOCK_ROWS. A fixed number of programs shares the items of all sequences, whatever their lengths; a second kernel
merges the segments of a row. So the bits of a row depend only on its own query, keys and context, for any batch
composition.

A program is one warp where its sums fit into the registers of one: warps that share a tile would wait for each other
several times per tile. The strides of the cache are constants, so addresses are too.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from sluice.kernels.checks import check
from sluice.kernels.paged_attention.call import LOG2_E, AttentionCall
from sluice.kernels.paged_attention.config import DecodeConfig, decode_rows, max_decode_tokens
from sluice.kernels.paged_attention.tile import join_sinks, sequence_of
from sluice.kernels.tanh.kernel import tanh

_LOG2_E = tl.constexpr(LOG2_E)

MAX_PARTS = 64
"""Most segments of a sequence, times its new tokens."""

_INTERPRETED_PROGRAMS = 4
"""Programs on a CPU: fewer than the items, as on a GPU."""


def attend_decodes(call: AttentionCall, config: DecodeConfig, *, segment_tokens: int, pads: bool) -> None:
    """Launch the kernels for all sequences with at most `max_decode_tokens` new tokens.

    `pads`: write zeros to the rows past the last sequence's.
    """
    check(
        segment_tokens % config.tile == 0,
        "segments of {} tokens are not whole tiles of {}",
        segment_tokens,
        config.tile,
    )
    partial, partial_max, partial_sum = _allocate_partials(call, config, segment_tokens)
    num_sequences, max_parts = partial_sum.shape[:2]
    split = {
        "max_parts": max_parts,
        "MAX_PARTS": MAX_PARTS,
        "BLOCK_QUERIES": max_decode_tokens(call.group),
        "TILE": config.tile,
        "SEGMENT": segment_tokens,
    }
    max_items = num_sequences * max_parts * call.kv_cache.num_kv_heads
    decode_kernel[(min(max_items, num_programs(call.query.device, config.programs_per_processor)),)](
        **call.arguments(),
        **{name.upper(): stride for name, stride in call.cache_strides().items()},
        **split,
        partial_ptr=partial,
        partial_max_ptr=partial_max,
        partial_sum_ptr=partial_sum,
        G=call.kv_cache.num_kv_heads,
        BLOCK_ROWS=decode_rows(call.group),
        BLOCK_S=32 if num_sequences <= 32 else max(256, triton.next_power_of_2(num_sequences)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    merge_kernel[(num_sequences, call.num_heads)](
        call.out,
        partial,
        partial_max,
        partial_sum,
        call.query_start_locs,
        call.context_lens,
        call.sinks,
        call.num_tokens if pads else 0,
        num_sequences,
        window=call.sliding_window,
        out_stride_token=call.out.stride(0),
        out_stride_head=call.out.stride(1),
        HAS_WINDOW=call.sliding_window > 0,
        H=call.num_heads,
        D=call.kv_cache.head_size,
        BLOCK_D=triton.next_power_of_2(call.kv_cache.head_size),
        BLOCK_SEGMENTS=16,
        **split,
        num_warps=4,
    )


def _allocate_partials(
    call: AttentionCall, config: DecodeConfig, segment_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make memory for the segments' sums of values `[S, parts, H, D]`, maxima and sums of weights `[S, parts, H]`."""
    max_tokens = min(call.max_query_len, max_decode_tokens(call.group))
    max_keys = call.max_context_len
    if call.sliding_window:
        max_keys = min(max_keys, call.sliding_window + max_tokens + config.tile)
    max_parts = min(MAX_PARTS, triton.cdiv(max_keys, segment_tokens) * max_tokens)
    shape = (call.num_sequences, max(max_parts, 1), call.num_heads)
    device = call.query.device
    partial = torch.empty((*shape, call.kv_cache.head_size), dtype=torch.float32, device=device)
    partial_max, partial_sum = torch.empty((2, *shape), dtype=torch.float32, device=device)
    return partial, partial_max, partial_sum


@cache
def num_programs(device: torch.device, programs_per_processor: int) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * programs_per_processor


@triton.jit
def _first_tile(query_len, context_len, window, HAS_WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return the start of the first tile with a key that is visible to a sequence's first new token."""
    if HAS_WINDOW:
        return tl.maximum(context_len - query_len - window + 1, 0) // TILE * TILE
    else:
        return context_len * 0


@triton.jit
def _segments_of(query_len, num_keys, MAX_PARTS: tl.constexpr, BLOCK_QUERIES: tl.constexpr, SEGMENT: tl.constexpr):
    """Return the tokens of a segment, and the number of segments: 0 for a sequence that is not computed here.

    Segments are short where few keys must be walked soon and long where many must be walked at the memory's rate:
    SEGMENT tokens up to 16 segments, twice as many up to 32, then four times as many or more.
    """
    is_decode = (query_len > 0) & (query_len <= BLOCK_QUERIES) & (num_keys > 0)
    size = tl.where(num_keys <= 16 * SEGMENT, SEGMENT, tl.where(num_keys <= 64 * SEGMENT, 2 * SEGMENT, 4 * SEGMENT))
    max_segments = MAX_PARTS // tl.where(is_decode, query_len, 1)
    most = size * max_segments
    size *= tl.maximum((num_keys + most - 1) // most, 1)
    return size, tl.where(is_decode, (num_keys + size - 1) // size, 0)


@triton.jit
def _blocks_of_tile(tile_start, first_key, end_key, table_ptr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's positions, which of them may be read, and their blocks and slots.

    If tiles divide blocks, there is one block and one first slot for the whole tile.
    """
    positions = tile_start + tl.arange(0, TILE)  # [TILE]
    readable = (positions >= first_key) & (positions < end_key)
    if BLOCK_SIZE % TILE == 0:
        # Of shape [1], not a scalar, so that the loop reads it ahead.
        starts = (tile_start + tl.arange(0, 1)).to(tl.uint32)
        block_ids = tl.load(table_ptr + starts // BLOCK_SIZE, mask=starts < end_key, other=0)
        slots = starts % BLOCK_SIZE
    else:
        block_ids = tl.load(table_ptr + positions.to(tl.uint32) // BLOCK_SIZE, mask=readable, other=0)
        slots = positions.to(tl.uint32) % BLOCK_SIZE
    return positions, readable, block_ids.to(tl.int64), slots.to(tl.int32)


@triton.jit
def _slot_ptrs(
    base_ptr,
    block_ids,
    slots,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_SLOT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return pointers `[TILE]` to the slots of a tile."""
    ptrs = base_ptr + block_ids * STRIDE_BLOCK + slots * STRIDE_SLOT
    if BLOCK_SIZE % TILE == 0:
        ptrs += tl.arange(0, TILE) * STRIDE_SLOT
    return ptrs


@triton.jit
def _fold_scores(
    scores,  # [BLOCK_ROWS, TILE] float32
    row_max,  # [BLOCK_ROWS] float32, in log2 units
    row_sum,  # [BLOCK_ROWS] float32
    positions,  # [TILE]
    ends,  # [BLOCK_ROWS]: after the last key that a row sees
    window,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Return the weights of a tile's keys, the factor on the sums so far, and the new maxima and sums."""
    if SOFT_CAP > 0.0:
        scores = tanh(scores) * (SOFT_CAP * _LOG2_E)
    visible = positions[None, :] < ends[:, None]
    if HAS_WINDOW:
        visible = visible & (ends[:, None] - positions[None, :] <= window)
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # For a row that has seen no key yet: compute exp2(-inf - x) = 0 instead of -inf - (-inf).
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, axis=1)


@triton.jit
def _attend_tile(
    acc,  # [BLOCK_ROWS, BLOCK_D] float32
    row_max,  # [BLOCK_ROWS] float32, in log2 units
    row_sum,  # [BLOCK_ROWS] float32
    query,  # [BLOCK_ROWS, BLOCK_D]
    ends,  # [BLOCK_ROWS]: after the last key that a row sees
    tile_start,
    first_key,
    end_key,
    table_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    score_scale,
    window,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KEY_STRIDE_BLOCK: tl.constexpr,
    KEY_STRIDE_SLOT: tl.constexpr,
    VALUE_STRIDE_BLOCK: tl.constexpr,
    VALUE_STRIDE_SLOT: tl.constexpr,
    SCALE_STRIDE_BLOCK: tl.constexpr,
    SCALE_STRIDE_SLOT: tl.constexpr,
):
    """Fold the keys `tile_start` … `tile_start + TILE` into the running softmax."""
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    positions, readable, block_ids, slots = _blocks_of_tile(
        tile_start, first_key, end_key, table_ptr, BLOCK_SIZE, TILE
    )  # fmt: skip
    # A masked score is not enough: 0 * NaN = NaN, so neither K nor V of a slot without a key may be read.
    key_ptrs = _slot_ptrs(key_ptr, block_ids, slots, KEY_STRIDE_BLOCK, KEY_STRIDE_SLOT, BLOCK_SIZE, TILE)
    key_mask = readable[None, :] & (dims < D)[:, None]
    key = tl.load(key_ptrs[None, :] + dims[:, None], mask=key_mask, other=0.0)
    value_ptrs = _slot_ptrs(value_ptr, block_ids, slots, VALUE_STRIDE_BLOCK, VALUE_STRIDE_SLOT, BLOCK_SIZE, TILE)
    value_mask = readable[:, None] & (dims < D)[None, :]
    value = tl.load(value_ptrs[:, None] + dims[None, :], mask=value_mask, other=0.0)

    scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * score_scale  # [BLOCK_ROWS, TILE]
    if IS_FP8:
        scale_ptrs = _slot_ptrs(
            key_scale_ptr, block_ids, slots, SCALE_STRIDE_BLOCK, SCALE_STRIDE_SLOT, BLOCK_SIZE, TILE
        )  # fmt: skip
        scores *= tl.load(scale_ptrs, mask=readable, other=0.0)[None, :]
    weights, rescale, row_max, row_sum = _fold_scores(
        scores, row_max, row_sum, positions, ends, window, HAS_WINDOW, SOFT_CAP
    )  # fmt: skip
    if IS_FP8:
        scale_ptrs = _slot_ptrs(
            value_scale_ptr, block_ids, slots, SCALE_STRIDE_BLOCK, SCALE_STRIDE_SLOT, BLOCK_SIZE, TILE
        )  # fmt: skip
        weights *= tl.load(scale_ptrs, mask=readable, other=0.0)[None, :]
    acc *= rescale[:, None]
    acc = tl.dot(weights.to(query.dtype), value.to(query.dtype), acc=acc, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def _power_of_two(x):
    """Return the largest power of two up to `x` >= 0, at least 2**-100, and its reciprocal. Of infinity: infinities."""
    bits = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 27 << 23)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def _attend_tile_fp8(
    even,  # [BLOCK_ROWS, BLOCK_D / 2] float32, in units of `unit` * 2**-14
    odd,  # as even
    unit,  # float32, a power of two
    row_max,  # [BLOCK_ROWS] float32, in log2 units
    row_sum,  # [BLOCK_ROWS] float32
    query,  # [BLOCK_ROWS, BLOCK_D] float16
    ends,  # [BLOCK_ROWS]: after the last key that a row sees
    tile_start,
    first_key,
    end_key,
    table_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    score_scales,  # [BLOCK_ROWS]
    window,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KEY_STRIDE_BLOCK: tl.constexpr,
    KEY_STRIDE_SLOT: tl.constexpr,
    VALUE_STRIDE_BLOCK: tl.constexpr,
    VALUE_STRIDE_SLOT: tl.constexpr,
    SCALE_STRIDE_BLOCK: tl.constexpr,
    SCALE_STRIDE_SLOT: tl.constexpr,
):
    """Fold the keys of a tile into the running softmax, in float16.

    A value is read as pairs of dimensions in 16 bits, since the matrix unit transposes nothing narrower: the even
    dimensions are one product, the odd ones another.
    """
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    pairs = tl.arange(0, BLOCK_D // 2)  # [BLOCK_D / 2]
    positions, readable, block_ids, slots = _blocks_of_tile(
        tile_start, first_key, end_key, table_ptr, BLOCK_SIZE, TILE
    )  # fmt: skip
    key_ptrs = _slot_ptrs(key_ptr, block_ids, slots, KEY_STRIDE_BLOCK, KEY_STRIDE_SLOT, BLOCK_SIZE, TILE)
    key_mask = readable[None, :] & (dims < D)[:, None]
    key = tl.load(key_ptrs[None, :] + dims[:, None], mask=key_mask, other=0.0)
    pair_ptr = value_ptr.to(tl.pointer_type(tl.int16))
    pair_ptrs = _slot_ptrs(
        pair_ptr, block_ids, slots, VALUE_STRIDE_BLOCK // 2, VALUE_STRIDE_SLOT // 2, BLOCK_SIZE, TILE
    )  # fmt: skip
    pair_mask = readable[:, None] & (pairs < D // 2)[None, :]
    value_pairs = tl.load(pair_ptrs[:, None] + pairs[None, :], mask=pair_mask, other=0)
    key_scale_ptrs = _slot_ptrs(
        key_scale_ptr, block_ids, slots, SCALE_STRIDE_BLOCK, SCALE_STRIDE_SLOT, BLOCK_SIZE, TILE
    )  # fmt: skip
    key_scales = tl.load(key_scale_ptrs, mask=readable, other=0.0)  # [TILE]
    value_scale_ptrs = _slot_ptrs(
        value_scale_ptr, block_ids, slots, SCALE_STRIDE_BLOCK, SCALE_STRIDE_SLOT, BLOCK_SIZE, TILE
    )  # fmt: skip
    value_scales = tl.load(value_scale_ptrs, mask=readable, other=0.0)

    scores = tl.dot(query, key.to(tl.float16))  # [BLOCK_ROWS, TILE]
    scores *= score_scales[:, None] * key_scales[None, :]
    weights, rescale, row_max, row_sum = _fold_scores(
        scores, row_max, row_sum, positions, ends, window, HAS_WINDOW, SOFT_CAP
    )  # fmt: skip
    # In units of the largest scale so far, so that float16 holds every product of a weight and a scale.
    new_unit, inverse = _power_of_two(tl.maximum(tl.max(value_scales, axis=0), unit))
    weights = (weights * (value_scales * (inverse * 16384.0))[None, :]).to(tl.float16)
    rescale = (rescale * (unit * inverse))[:, None]
    value_even = (value_pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    value_odd = ((value_pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    even = tl.dot(weights, value_even, acc=even * rescale)
    odd = tl.dot(weights, value_odd, acc=odd * rescale)
    return even, odd, new_unit, row_max, row_sum


@triton.jit(do_not_specialize=["T", "S", "max_parts", "window", "table_stride_sequence"])
def decode_kernel(
    out_ptr,  # unused
    partial_ptr,  # [S, max_parts, H, D] float32; the parts of a sequence are its segments times its tokens
    partial_max_ptr,  # [S, max_parts, H] float32, in log2 units
    partial_sum_ptr,  # [S, max_parts, H] float32
    query_ptr,  # [T, H, D]
    key_cache_ptr,  # [blocks, G, block_size, D] by its strides
    value_cache_ptr,  # as key_cache
    block_tables_ptr,  # [S, max_blocks] int32
    query_start_locs_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    key_scales_ptr,  # [blocks, G, block_size] float32 by its strides; unused unless IS_FP8
    value_scales_ptr,  # as key_scales
    sinks_ptr,  # unused
    score_scale,  # of a score in log2 units; with a soft cap, in units of the cap
    T,
    S,
    max_parts,
    window,  # unused unless HAS_WINDOW
    out_stride_token,
    out_stride_head,
    query_stride_token,
    query_stride_head,
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
    MAX_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    KEY_STRIDE_BLOCK: tl.constexpr,
    KEY_STRIDE_HEAD: tl.constexpr,
    KEY_STRIDE_SLOT: tl.constexpr,
    VALUE_STRIDE_BLOCK: tl.constexpr,
    VALUE_STRIDE_HEAD: tl.constexpr,
    VALUE_STRIDE_SLOT: tl.constexpr,
    SCALE_STRIDE_BLOCK: tl.constexpr,
    SCALE_STRIDE_HEAD: tl.constexpr,
    SCALE_STRIDE_SLOT: tl.constexpr,
):
    """Each program computes every `tl.num_programs(0)`-th item: a segment of a key-value head."""
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    rows = tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    queries = rows // GROUP  # [BLOCK_ROWS], in the sequence's new tokens

    sequences = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    query_starts = tl.load(query_start_locs_ptr + sequences, mask=sequences < S, other=0)
    query_lens = tl.load(query_start_locs_ptr + sequences + 1, mask=sequences < S, other=0) - query_starts
    contexts = tl.load(context_lens_ptr + sequences, mask=sequences < S, other=0)
    contexts -= _first_tile(query_lens, contexts, window, HAS_WINDOW, TILE)
    _sizes, counts = _segments_of(query_lens, contexts, MAX_PARTS, BLOCK_QUERIES, SEGMENT)
    segments_end = tl.cumsum(counts, axis=0)  # [BLOCK_S]: segments of the sequences up to and including each
    num_items = tl.sum(counts, axis=0) * G

    item = tl.program_id(0)
    sequence, segment = sequence_of(item // G, segments_end, S)
    query_start = tl.load(query_start_locs_ptr + sequence)
    query_len = tl.load(query_start_locs_ptr + sequence + 1) - query_start
    context_len = tl.load(context_lens_ptr + sequence)
    for _ in range(tl.cdiv(num_items - item, tl.num_programs(0))):
        # Of the next item, whose loads are over when this one is.
        next_item = item + tl.num_programs(0)
        next_sequence, next_segment = sequence_of(next_item // G, segments_end, S)
        next_query_start = tl.load(query_start_locs_ptr + next_sequence)
        next_query_len = tl.load(query_start_locs_ptr + next_sequence + 1) - next_query_start
        next_context_len = tl.load(context_lens_ptr + next_sequence)

        kv_head = (item % G).to(tl.int64)
        keys_start = _first_tile(query_len, context_len, window, HAS_WINDOW, TILE)
        size, _count = _segments_of(query_len, context_len - keys_start, MAX_PARTS, BLOCK_QUERIES, SEGMENT)

        inside = queries < tl.minimum(query_len, BLOCK_QUERIES)
        heads = kv_head * GROUP + rows % GROUP  # [BLOCK_ROWS]
        ends = context_len - query_len + queries + 1  # [BLOCK_ROWS]: after the last key that a row sees
        tokens = (query_start + queries).to(tl.int64)
        query_ptrs = query_ptr + tokens[:, None] * query_stride_token + heads[:, None] * query_stride_head
        query = tl.load(query_ptrs + dims[None, :], mask=inside[:, None] & (dims < D)[None, :], other=0.0)

        row_max = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
        first_key = 0
        if HAS_WINDOW:
            first_key = tl.maximum(context_len - query_len - window + 1, 0)
        tiles_start = keys_start + segment * size
        tiles_end = tl.minimum(tiles_start + size, context_len)
        table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride_sequence
        key_ptr = key_cache_ptr + kv_head * KEY_STRIDE_HEAD
        value_ptr = value_cache_ptr + kv_head * VALUE_STRIDE_HEAD
        key_scale_ptr = key_scales_ptr + kv_head * SCALE_STRIDE_HEAD
        value_scale_ptr = value_scales_ptr + kv_head * SCALE_STRIDE_HEAD
        partial_rows = (sequence.to(tl.int64) * max_parts + segment * query_len + queries) * H + heads
        partial_ptrs = partial_ptr + partial_rows[:, None] * D

        if IS_FP8 and query_ptr.dtype.element_ty != tl.float32:
            # Rows of bfloat16 are scaled by powers of two, so that float16 holds them.
            score_scales = tl.full([BLOCK_ROWS], 1.0, dtype=tl.float32) * score_scale
            if query_ptr.dtype.element_ty == tl.bfloat16:
                power, inverse = _power_of_two(tl.max(tl.abs(query.to(tl.float32)), axis=1))
                query = (query.to(tl.float32) * inverse[:, None]).to(tl.float16)
                score_scales *= power
            even = tl.zeros([BLOCK_ROWS, BLOCK_D // 2], dtype=tl.float32)
            odd = tl.zeros([BLOCK_ROWS, BLOCK_D // 2], dtype=tl.float32)
            unit = tl.max(row_sum, axis=0)  # 0
            for tile_start in range(tiles_start, tiles_end, TILE):
                even, odd, unit, row_max, row_sum = _attend_tile_fp8(
                    even, odd, unit, row_max, row_sum, query, ends, tile_start, first_key, tiles_end,
                    table_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
                    score_scales,
                    window, HAS_WINDOW, SOFT_CAP, D, BLOCK_D, BLOCK_SIZE, TILE,
                    KEY_STRIDE_BLOCK, KEY_STRIDE_SLOT, VALUE_STRIDE_BLOCK, VALUE_STRIDE_SLOT,
                    SCALE_STRIDE_BLOCK, SCALE_STRIDE_SLOT,
                )  # fmt: skip
            pairs = tl.arange(0, BLOCK_D // 2)  # [BLOCK_D / 2]
            partial_mask = inside[:, None] & (pairs < D // 2)[None, :]
            tl.store(partial_ptrs + 2 * pairs[None, :], even * (unit / 16384.0), mask=partial_mask)
            tl.store(partial_ptrs + 2 * pairs[None, :] + 1, odd * (unit / 16384.0), mask=partial_mask)
        else:
            acc = tl.zeros([BLOCK_ROWS, BLOCK_D], dtype=tl.float32)
            for tile_start in range(tiles_start, tiles_end, TILE):
                acc, row_max, row_sum = _attend_tile(
                    acc, row_max, row_sum, query, ends, tile_start, first_key, tiles_end,
                    table_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
                    score_scale,
                    window, HAS_WINDOW, SOFT_CAP, IS_FP8, D, BLOCK_D, BLOCK_SIZE, TILE,
                    KEY_STRIDE_BLOCK, KEY_STRIDE_SLOT, VALUE_STRIDE_BLOCK, VALUE_STRIDE_SLOT,
                    SCALE_STRIDE_BLOCK, SCALE_STRIDE_SLOT,
                )  # fmt: skip
            tl.store(partial_ptrs + dims[None, :], acc, mask=inside[:, None] & (dims < D)[None, :])

        tl.store(partial_max_ptr + partial_rows, row_max, mask=inside)
        tl.store(partial_sum_ptr + partial_rows, row_sum, mask=inside)
        item, sequence, segment = next_item, next_sequence, next_segment
        query_start, query_len, context_len = next_query_start, next_query_len, next_context_len


@triton.jit(do_not_specialize=["T", "S", "max_parts", "window"])
def merge_kernel(
    out_ptr,  # [T, H, D]
    partial_ptr,  # [S, max_parts, H, D] float32
    partial_max_ptr,  # [S, max_parts, H] float32, in log2 units
    partial_sum_ptr,  # [S, max_parts, H] float32
    query_start_locs_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    sinks_ptr,  # [H] float32, or None
    T,
    S,
    max_parts,
    window,
    out_stride_token,
    out_stride_head,
    HAS_WINDOW: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """One program per (sequence, head): the segments' sums, rescaled to their common maximum and divided."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    query_start = tl.load(query_start_locs_ptr + sequence)
    query_len = tl.load(query_start_locs_ptr + sequence + 1) - query_start
    context_len = tl.load(context_lens_ptr + sequence)
    num_tokens = tl.load(query_start_locs_ptr + S)
    num_keys = context_len - _first_tile(query_len, context_len, window, HAS_WINDOW, TILE)
    _, num_segments = _segments_of(query_len, num_keys, MAX_PARTS, BLOCK_QUERIES, SEGMENT)
    # Scalar offsets go to the pointers, not into the blocks of offsets: triton 3.5 and 3.6 miscompile the latter.
    first_row = sequence.to(tl.int64) * max_parts * H + head
    out_ptr += head * out_stride_head

    padding = (num_tokens + sequence).to(tl.int64)
    while padding < T:
        tl.store(
            out_ptr + padding * out_stride_token + dims, tl.zeros([BLOCK_D], out_ptr.dtype.element_ty), mask=dims < D
        )
        padding += S

    if query_len <= BLOCK_QUERIES:
        for query in range(query_len):
            total_max = tl.full([1], float("-inf"), dtype=tl.float32)
            total_sum = tl.zeros([1], dtype=tl.float32)
            acc = tl.zeros([BLOCK_D], dtype=tl.float32)
            row = first_row + query * H
            for start in range(0, num_segments, BLOCK_SEGMENTS):
                segments = start + tl.arange(0, BLOCK_SEGMENTS)  # [BLOCK_SEGMENTS]
                parts = segments * (query_len * H)
                maxima = tl.load(partial_max_ptr + row + parts, mask=segments < num_segments, other=float("-inf"))
                sums = tl.load(partial_sum_ptr + row + parts, mask=segments < num_segments, other=0.0)
                partial_ptrs = partial_ptr + row * D + parts[:, None] * D + dims[None, :]
                partial_mask = (segments < num_segments)[:, None] & (dims < D)[None, :]
                partials = tl.load(partial_ptrs, mask=partial_mask, other=0.0)

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
            out_row_ptr = out_ptr + (query_start + query).to(tl.int64) * out_stride_token
            tl.store(out_row_ptr + dims, out.to(out_ptr.dtype.element_ty), mask=dims < D)
