# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Head norm, rotation and the store into the cache in one Triton kernel: queries, keys and values are read once.

A program takes a few heads of one token of any kind: queries go to `out`, keys and values from registers to their slot.
As three kernels the same work costs two more launches and one more round trip of queries and keys to memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.e4m3 import to_e4m3
from sluice.kernels.paged_attention.layout import KVCache
from sluice.kernels.rope.kernel import load_angles
from sluice.kernels.write_kv import HeadNorm

BLOCK_HEADS = 8


_LARGEST = tl.constexpr(448.0)


@triton.jit
def _magnitude(x, inside):
    """Return the largest magnitude of each row, infinity if it has a NaN, `[BLOCK_N]`."""
    x = x.to(tl.float32)
    return tl.max(tl.where(inside, tl.where(x == x, tl.abs(x), float("inf")), 0.0), axis=1)


@triton.jit
def _load_weight(query_weight_ptr, key_weight_ptr, dims, inside, is_query, weight_offset):
    """Load the norm factors of each head at `dims`, `[BLOCK_N, dims]` float32."""
    query_weight = tl.load(query_weight_ptr + dims, mask=inside, other=0.0)[None, :]
    key_weight = tl.load(key_weight_ptr + dims, mask=inside, other=0.0)[None, :]
    return tl.where(is_query, query_weight, key_weight).to(tl.float32) + weight_offset


@triton.jit
def _write_kv_kernel(
    out_ptr,  # [T, H, D], contiguous
    key_cache_ptr,  # [blocks, block_size, G, D] by its strides
    value_cache_ptr,  # as key_cache
    qkv_ptr,  # [T, (H + 2 * G) * D]
    positions_ptr,  # [T] int64
    slot_mapping_ptr,  # [T] int64
    cos_sin_ptr,  # [P, R] float32
    query_weight_ptr,  # [D]; unused unless HAS_NORM
    key_weight_ptr,  # [D]; unused unless HAS_NORM
    key_scales_ptr,  # [blocks, block_size, G] float32 by its strides; unused unless IS_FP8
    value_scales_ptr,  # as key_scales
    eps,
    weight_offset,
    qkv_stride_token,
    key_stride_block,
    key_stride_slot,
    key_stride_head,
    value_stride_block,
    value_stride_slot,
    value_stride_head,
    scale_stride_block,
    scale_stride_slot,
    scale_stride_head,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """One program per (token, block of heads); heads are numbered as in a row of `qkv`."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    pairs = tl.arange(0, BLOCK_PAIRS)  # [BLOCK_PAIRS]
    rest = R + tl.arange(0, BLOCK_REST)  # [BLOCK_REST]: elements that are not rotated
    inside = (heads < H + 2 * G)[:, None] & (pairs < R // 2)[None, :]
    inside_rest = (heads < H + 2 * G)[:, None] & (rest < D)[None, :]
    dtype = out_ptr.dtype.element_ty

    # Load the data first: its latency hides that of the position and of the angles, which depend on it.
    rows = qkv_ptr + token * qkv_stride_token + heads[:, None] * D  # [BLOCK_N, 1]
    raw_first = tl.load(rows + pairs[None, :], mask=inside, other=0.0)
    raw_second = tl.load(rows + R // 2 + pairs[None, :], mask=inside, other=0.0)
    slot = tl.load(slot_mapping_ptr + token)
    cos, sin = load_angles(cos_sin_ptr, tl.load(positions_ptr + token), pairs, pairs < R // 2, R)
    first = raw_first.to(tl.float32)
    second = raw_second.to(tl.float32)
    raw_passed = raw_first  # unused where all is rotated
    if R < D:
        raw_passed = tl.load(rows + rest[None, :], mask=inside_rest, other=0.0)
    passed = raw_passed.to(tl.float32)

    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if R < D:
            squares += tl.sum(passed * passed, axis=1)
        mean_squares = tl.div_rn(squares, tl.zeros_like(squares) + D)
        # One division per head instead of one per element, which on a GPU is neither cheap nor exact.
        inverse = tl.div_rn(tl.zeros_like(squares) + 1.0, tl.sqrt_rn(mean_squares + eps))[:, None]  # [BLOCK_N, 1]
        is_query = (heads < H)[:, None]
        weight_first = _load_weight(query_weight_ptr, key_weight_ptr, pairs, pairs < R // 2, is_query, weight_offset)
        weight_second = _load_weight(
            query_weight_ptr, key_weight_ptr, R // 2 + pairs, pairs < R // 2, is_query, weight_offset
        )
        # Rounded before the rotation, as in separate steps.
        first = (first * inverse * weight_first).to(dtype).to(tl.float32)
        second = (second * inverse * weight_second).to(dtype).to(tl.float32)
        if R < D:
            weight_rest = _load_weight(query_weight_ptr, key_weight_ptr, rest, rest < D, is_query, weight_offset)
            passed = passed * inverse * weight_rest

    # Values are stored unchanged, bit by bit.
    is_value = (heads >= H + G)[:, None]
    out_first = tl.where(is_value, raw_first, (first * cos - second * sin).to(dtype))
    out_second = tl.where(is_value, raw_second, (second * cos + first * sin).to(dtype))

    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    kv_heads = tl.where(heads < H + G, heads - H, heads - H - G).to(tl.int64)[:, None]
    query_rows = out_ptr + token * H * D + heads[:, None] * D
    key_rows = key_cache_ptr + block * key_stride_block + offset * key_stride_slot + kv_heads * key_stride_head
    value_rows = (
        value_cache_ptr + block * value_stride_block + offset * value_stride_slot + kv_heads * value_stride_head
    )
    is_query = (heads < H)[:, None]
    # A negative slot stores nothing: it must not wrap round to the cache's last block. One flag per head, since the
    # interpreter of triton 3.9 cannot combine a block and a scalar into a mask.
    has_slot = (tl.zeros([BLOCK_N], dtype=tl.int64) + slot >= 0)[:, None]
    is_stored_key = (heads >= H)[:, None] & (heads < H + G)[:, None] & has_slot
    is_stored_value = is_value & has_slot
    tl.store(query_rows + pairs[None, :], out_first, mask=inside & is_query)
    tl.store(query_rows + R // 2 + pairs[None, :], out_second, mask=inside & is_query)
    out_rest = out_first  # unused where all is rotated
    if R < D:
        out_rest = tl.where(is_value, raw_passed, passed.to(dtype))
        tl.store(query_rows + rest[None, :], out_rest, mask=inside_rest & is_query)
    if IS_FP8:
        largest = tl.maximum(_magnitude(out_first, inside), _magnitude(out_second, inside))  # [BLOCK_N]
        if R < D:
            largest = tl.maximum(largest, _magnitude(out_rest, inside_rest))
        scales = tl.div_rn(largest, tl.zeros_like(largest) + _LARGEST)[:, None]
        scale_at = block * scale_stride_block + offset * scale_stride_slot + kv_heads * scale_stride_head
        tl.store(key_scales_ptr + scale_at, scales, mask=is_stored_key)
        tl.store(value_scales_ptr + scale_at, scales, mask=is_stored_value & (heads < H + 2 * G)[:, None])
        divisors = tl.where(scales == 0.0, 1.0, scales)
        out_first = to_e4m3(tl.div_rn(out_first.to(tl.float32), tl.zeros_like(first) + divisors))
        out_second = to_e4m3(tl.div_rn(out_second.to(tl.float32), tl.zeros_like(first) + divisors))
        if R < D:
            out_rest = to_e4m3(tl.div_rn(out_rest.to(tl.float32), tl.zeros_like(passed) + divisors))
    tl.store(key_rows + pairs[None, :], out_first, mask=inside & is_stored_key)
    tl.store(key_rows + R // 2 + pairs[None, :], out_second, mask=inside & is_stored_key)
    tl.store(value_rows + pairs[None, :], out_first, mask=inside & is_stored_value)
    tl.store(value_rows + R // 2 + pairs[None, :], out_second, mask=inside & is_stored_value)
    if R < D:
        tl.store(key_rows + rest[None, :], out_rest, mask=inside_rest & is_stored_key)
        tl.store(value_rows + rest[None, :], out_rest, mask=inside_rest & is_stored_value)


def write_kv_triton(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    kv_cache: KVCache,
    *,
    head_norm: HeadNorm | None,
    out: Tensor,
) -> None:
    """Launch the kernel; see `sluice.kernels.write_kv.write_kv`."""
    num_tokens, num_heads, head_size = out.shape
    num_kv_heads, rotary_size = kv_cache.num_kv_heads, cos_sin.shape[1]
    if num_tokens == 0:
        return
    keys, values = kv_cache.keys, kv_cache.values
    key_scales, value_scales = kv_cache.key_scales, kv_cache.value_scales
    if key_scales is None or value_scales is None:
        key_scales = value_scales = cos_sin.new_empty(0).view(0, 1, 1)
    else:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    total_heads = num_heads + 2 * num_kv_heads
    block_heads = min(BLOCK_HEADS, triton.next_power_of_2(total_heads))
    _write_kv_kernel[(num_tokens, triton.cdiv(total_heads, block_heads))](
        out,
        keys,
        values,
        qkv,
        positions,
        slot_mapping,
        cos_sin,
        head_norm.query_weight if head_norm else qkv,
        head_norm.key_weight if head_norm else qkv,
        key_scales,
        value_scales,
        head_norm.eps if head_norm else 0.0,
        head_norm.weight_offset if head_norm else 0.0,
        qkv.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        key_scales.stride(0),
        key_scales.stride(1),
        key_scales.stride(2),
        H=num_heads,
        G=num_kv_heads,
        D=head_size,
        R=rotary_size,
        BLOCK_SIZE=kv_cache.block_size,
        HAS_NORM=head_norm is not None,
        IS_FP8=kv_cache.is_fp8,
        BLOCK_N=block_heads,
        BLOCK_PAIRS=triton.next_power_of_2(max(rotary_size // 2, 1)),
        BLOCK_REST=triton.next_power_of_2(max(head_size - rotary_size, 1)),
        num_warps=2 if block_heads * head_size >= 512 else 1,
    )
