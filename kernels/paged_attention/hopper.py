# Gluon is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Paged attention of prefill chunks on Hopper (sm_90), in Gluon: warps specialised to copying and to computing.

A program has the rows of one in `prefill`. Four warps copy tiles of keys and values from the cache into rings in shared
memory; two groups of four warps, each with half of the rows, compute, and never wait for each other. A group starts the
product of a tile before it has finished the tile before (FlashAttention-3, Shah et al., 2024). Triton's own pipeline
cannot express this: there all warps wait for each other twice per tile, so softmax and products take turns.

It serves what it was measured with (`serves`). `prefill` serves the rest, and its results agree within rounding.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sluice.kernels.paged_attention.call import AttentionCall, Chunks
from sluice.kernels.paged_attention.prefill import find_sequence
from sluice.kernels.paged_attention.tile import is_short_chunk

_ROWS = gl.constexpr(64)
"""Rows of a computing group: what one instruction of the tensor cores takes."""

_D = gl.constexpr(128)
_TILE = gl.constexpr(128)
_STAGES = gl.constexpr(2)
"""Tiles of a ring."""

_BLOCK_SIZE = gl.constexpr(16)
_REGISTERS, _COPY_REGISTERS = gl.constexpr(224), gl.constexpr(56)
"""Per thread of a computing and of the copying group: together all that a multiprocessor has."""

# 16 bytes per thread.
_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
# Of scores [ROWS, TILE] and of outputs [ROWS, D], which are of one size.
_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_ROW = gl.constexpr(gl.SliceLayout(1, _PRODUCT.value))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _PRODUCT.value, 2))


def serves(call: AttentionCall) -> bool:
    """Whether the kernel serves a call: what it was measured with, in rows of whole 16 bytes."""
    query, kv_cache = call.query, call.kv_cache
    strides = (*query.stride()[:2], *kv_cache.keys.stride()[:3], *kv_cache.values.stride()[:3])
    return (
        query.dtype == kv_cache.keys.dtype == torch.bfloat16
        and kv_cache.head_size == _D.value
        and kv_cache.block_size == _BLOCK_SIZE.value
        and _ROWS.value % call.group == 0
        and not (call.sliding_window or call.soft_cap or call.sinks is not None)
        and all(stride % 16 == 0 for stride in strides)
        and all(tensor.data_ptr() % 16 == 0 for tensor in (query, kv_cache.keys, kv_cache.values))
    )


def attend_chunks_on_hopper(call: AttentionCall, chunks: Chunks) -> None:
    """Launch the kernel for all sequences of `chunks` that are not short."""
    num_query_blocks = call.num_tokens * call.group // (2 * _ROWS.value) + call.num_sequences
    arguments = {**call.arguments(), **call.cache_strides(), **chunks.arguments()}
    names = [parameter.name for parameter in prefill_kernel.params]
    prefill_kernel[(call.kv_cache.num_kv_heads, num_query_blocks)](
        **{name: arguments[name] for name in names}, num_warps=4
    )


@gluon.jit
def _copy_tile(
    tile,  # [TILE, D] in shared memory
    full,
    cache_ptr,
    table_ptr,
    tile_start,
    end_key,
    stride_block,
    stride_slot,
):
    """Start to copy the keys or values from `tile_start` on; `full` completes when they have arrived.

    Slots from `end_key` on are not read, and become zeros: 0 * NaN would be NaN.
    """
    slots = gl.arange(0, _BLOCK_SIZE, gl.SliceLayout(1, _LAYOUT))
    dims = gl.arange(0, _D, gl.SliceLayout(0, _LAYOUT))
    slot_ptrs = cache_ptr + (slots * stride_slot)[:, None] + dims[None, :]
    for at in gl.static_range(0, _TILE, _BLOCK_SIZE):
        start = tile_start + at
        block_id = gl.load(table_ptr + start // _BLOCK_SIZE, mask=start < end_key, other=0).to(gl.int64)
        mask = (start + slots < end_key)[:, None] & (dims < _D)[None, :]
        block_ptrs = slot_ptrs + block_id * stride_block
        async_copy.async_copy_global_to_shared(tile.slice(at, _BLOCK_SIZE), block_ptrs, mask=mask)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _copy(
    key_tiles,
    value_tiles,
    key_full,
    key_empty,
    value_full,
    value_empty,
    key_ptr,
    value_ptr,
    table_ptr,
    num_tiles,
    end_key,
    key_stride_block,
    key_stride_slot,
    value_stride_block,
    value_stride_slot,
):
    """Copy all tiles of keys and values, each as soon as its stage of the ring is empty."""
    for tile in range(num_tiles):
        stage = tile % _STAGES
        phase = (tile // _STAGES) & 1
        mbarrier.wait(key_empty.index(stage), phase ^ 1)
        _copy_tile(
            key_tiles.index(stage), key_full.index(stage), key_ptr, table_ptr, tile * _TILE, end_key,
            key_stride_block, key_stride_slot,
        )  # fmt: skip
        mbarrier.wait(value_empty.index(stage), phase ^ 1)
        _copy_tile(
            value_tiles.index(stage), value_full.index(stage), value_ptr, table_ptr, tile * _TILE, end_key,
            value_stride_block, value_stride_slot,
        )  # fmt: skip


@gluon.jit
def _weigh(
    scores,  # [ROWS, TILE]
    row_max,  # [ROWS], in log2 units
    row_sum,  # [ROWS]
    query_positions,  # [ROWS]
    tile_start,
    first_position,  # of the rows
    score_scale,
):
    """Fold a tile's scores into the running softmax; returns the weights and the factor on earlier sums."""
    if tile_start + _TILE > first_position + 1:
        positions = tile_start + gl.arange(0, _TILE, gl.SliceLayout(0, _PRODUCT))
        scores = gl.where(positions[None, :] <= query_positions[:, None], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, axis=1) * score_scale)
    # For a row that has seen no key yet: compute exp2(-inf - x) = 0 instead of -inf - (-inf).
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(scores * score_scale - shift[:, None])
    rescale = gl.exp2(row_max - shift)
    return weights, rescale, new_max, row_sum * rescale + gl.sum(weights, axis=1)


@gluon.jit
def _compute(
    query_tile,  # [ROWS, D] in shared memory
    key_tiles,
    value_tiles,
    key_full,
    key_empty,
    value_full,
    value_empty,
    out_ptr,
    query_ptr,
    kv_head,
    query_start,
    query_len,
    context_len,
    first_query,
    num_tiles,
    score_scale,
    out_stride_token,
    out_stride_head,
    query_stride_token,
    query_stride_head,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Attend half of a program's rows to all tiles."""
    rows = HALF * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, _LAYOUT))
    dims = gl.arange(0, _D, gl.SliceLayout(0, _LAYOUT))
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    tokens = (query_start + queries).to(gl.int64)
    mask = (queries < query_len)[:, None] & (dims < _D)[None, :]
    query_ptrs = query_ptr + (tokens * query_stride_token + heads * query_stride_head)[:, None] + dims[None, :]
    query_tile.store(gl.load(query_ptrs, mask=mask, other=0.0))
    fence_async_shared()

    first_position = context_len - query_len + first_query + HALF * _ROWS // GROUP
    query_positions = first_position + gl.arange(0, _ROWS, _ROW) // GROUP
    row_max = gl.full([_ROWS], float("-inf"), gl.float32, _ROW)
    row_sum = gl.full([_ROWS], 0.0, gl.float32, _ROW)
    acc = gl.full([_ROWS, _D], 0.0, gl.float32, _PRODUCT)
    no_scores = gl.full([_ROWS, _TILE], 0.0, gl.float32, _PRODUCT)

    # Copies of the copying warps are writes of another proxy than the products' reads.
    mbarrier.wait(key_full.index(0), 0)
    fence_async_shared()
    scores = warpgroup_mma(query_tile, key_tiles.index(0).permute((1, 0)), no_scores, use_acc=False)
    mbarrier.arrive(key_empty.index(0), count=1)
    weights, rescale, row_max, row_sum = _weigh(
        scores, row_max, row_sum, query_positions, 0, first_position, score_scale
    )
    weights = gl.convert_layout(weights.to(query_tile.dtype), _WEIGHTS)
    for tile in range(1, num_tiles):
        stage = tile % _STAGES
        before = (tile - 1) % _STAGES
        mbarrier.wait(key_full.index(stage), (tile // _STAGES) & 1)
        fence_async_shared()
        coming = warpgroup_mma(
            query_tile, key_tiles.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        mbarrier.wait(value_full.index(before), ((tile - 1) // _STAGES) & 1)
        fence_async_shared()
        adding = warpgroup_mma(weights, value_tiles.index(before), acc, is_async=True)
        # The sum of the previous tile continues during this tile's softmax.
        scores = warpgroup_mma_wait(1, deps=(coming,))
        mbarrier.arrive(key_empty.index(stage), count=1)
        coming_weights, rescale, row_max, row_sum = _weigh(
            scores, row_max, row_sum, query_positions, tile * _TILE, first_position, score_scale
        )
        acc = warpgroup_mma_wait(0, deps=(adding,))
        mbarrier.arrive(value_empty.index(before), count=1)
        acc = acc * rescale[:, None]
        weights = gl.convert_layout(coming_weights.to(query_tile.dtype), _WEIGHTS)
    last = num_tiles - 1
    mbarrier.wait(value_full.index(last % _STAGES), (last // _STAGES) & 1)
    fence_async_shared()
    acc = warpgroup_mma(weights, value_tiles.index(last % _STAGES), acc)

    # A row without a visible key (padding) has sum 0 and becomes 0.
    out = acc / gl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out = gl.convert_layout(out.to(query_tile.dtype), _LAYOUT)
    out_ptrs = out_ptr + (tokens * out_stride_token + heads * out_stride_head)[:, None] + dims[None, :]
    gl.store(out_ptrs, out, mask=mask)


@gluon.jit
def _zero_padding(out_ptr, first, T, out_stride_token, out_stride_head, GROUP: gl.constexpr):
    """Write zeros to row `first` and every `gl.num_programs(1)`-th after it, to GROUP heads."""
    heads = gl.arange(0, _ROWS, gl.SliceLayout(1, _LAYOUT))
    dims = gl.arange(0, _D, gl.SliceLayout(0, _LAYOUT))
    mask = (heads < GROUP)[:, None] & (dims < _D)[None, :]
    zeros = gl.full([_ROWS, _D], 0.0, out_ptr.dtype.element_ty, _LAYOUT)
    padding = first.to(gl.int64)
    while padding < T:
        out_ptrs = out_ptr + padding * out_stride_token + (heads * out_stride_head)[:, None] + dims[None, :]
        gl.store(out_ptrs, zeros, mask=mask)
        padding += gl.num_programs(1)


@gluon.jit(do_not_specialize=["T", "S", "min_query_len", "min_keys", "table_stride_sequence"])
def prefill_kernel(
    out_ptr,  # [T, H, D]
    query_ptr,  # [T, H, D]
    key_cache_ptr,  # [blocks, G, block_size, D] by its strides
    value_cache_ptr,  # as key_cache
    block_tables_ptr,  # [S, max_blocks] int32
    query_start_locs_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    score_scale,  # of a score in log2 units
    T,
    S,
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
    table_stride_sequence,
    GROUP: gl.constexpr,
):
    """One program per (key-value head, block of queries)."""
    BLOCK_QUERIES: gl.constexpr = 2 * _ROWS // GROUP
    kv_head = gl.program_id(0).to(gl.int64)
    padding = gl.load(query_start_locs_ptr + S) + gl.program_id(1)
    _zero_padding(out_ptr + kv_head * GROUP * out_stride_head, padding, T, out_stride_token, out_stride_head, GROUP)

    # The last blocks of a prompt see the most keys, so they start first: those of all heads.
    query_block = gl.num_programs(1) - 1 - gl.program_id(1)
    sequence = find_sequence(query_start_locs_ptr, query_block, S, BLOCK_QUERIES)
    query_start = gl.load(query_start_locs_ptr + sequence)
    first_query = (query_block - (query_start // BLOCK_QUERIES + sequence)) * BLOCK_QUERIES
    query_len = gl.load(query_start_locs_ptr + sequence + 1) - query_start
    if (first_query >= query_len) | (query_len < min_query_len):
        return
    context_len = gl.load(context_lens_ptr + sequence)
    if is_short_chunk(query_len, context_len, min_query_len, min_keys):
        return
    end_key = gl.minimum(context_len - query_len + first_query + BLOCK_QUERIES, context_len)
    # At least one: the rows of a sequence without context see a tile without keys.
    num_tiles = gl.maximum((end_key + _TILE - 1) // _TILE, 1)

    dtype: gl.constexpr = query_ptr.dtype.element_ty
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    query_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, _D], TILES)
    key_tiles = gl.allocate_shared_memory(dtype, [_STAGES, _TILE, _D], TILES)
    value_tiles = gl.allocate_shared_memory(dtype, [_STAGES, _TILE, _D], TILES)
    key_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIERS)
    key_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIERS)
    value_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIERS)
    value_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIERS)
    for stage in gl.static_range(_STAGES):
        # Full when the copies of each copying thread have arrived, empty when both computing groups have read.
        mbarrier.init(key_full.index(stage), count=128)
        mbarrier.init(value_full.index(stage), count=128)
        mbarrier.init(key_empty.index(stage), count=2)
        mbarrier.init(value_empty.index(stage), count=2)
    table_ptr = block_tables_ptr + sequence.to(gl.int64) * table_stride_sequence
    key_ptr = key_cache_ptr + kv_head * key_stride_head
    value_ptr = value_cache_ptr + kv_head * value_stride_head
    gl.warp_specialize(
        [
            (_compute, (
                query_tiles.index(0), key_tiles, value_tiles, key_full, key_empty, value_full, value_empty,
                out_ptr, query_ptr, kv_head, query_start, query_len, context_len, first_query, num_tiles, score_scale,
                out_stride_token, out_stride_head, query_stride_token, query_stride_head, 0, GROUP,
            )),
            (_compute, (
                query_tiles.index(1), key_tiles, value_tiles, key_full, key_empty, value_full, value_empty,
                out_ptr, query_ptr, kv_head, query_start, query_len, context_len, first_query, num_tiles, score_scale,
                out_stride_token, out_stride_head, query_stride_token, query_stride_head, 1, GROUP,
            )),
            (_copy, (
                key_tiles, value_tiles, key_full, key_empty, value_full, value_empty, key_ptr, value_ptr, table_ptr,
                num_tiles, end_key, key_stride_block, key_stride_slot, value_stride_block, value_stride_slot,
            )),
        ],
        [4, 4],
        [_REGISTERS, _COPY_REGISTERS],
    )  # fmt: skip
