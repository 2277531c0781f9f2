"""Head norm, rotation and storing of keys and values on the CPU: native.c for the packed cache, otherwise torch."""

import torch
from torch import Tensor

from sluice.kernels.dtypes import DTYPE_CODES
from sluice.kernels.native import native_function
from sluice.kernels.paged_attention.layout import KVCache, Layout, padded
from sluice.kernels.paged_attention.narrow import to_8_bits
from sluice.kernels.rms_norm.cpu import normalised
from sluice.kernels.rope.cpu import rope_cpu
from sluice.kernels.write_kv import HeadNorm

SIGNATURE = ("sluice_write_kv", "iplpppppffppp" + "liiiiliipp")


def write_kv_cpu(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    kv_cache: KVCache,
    *,
    head_norm: HeadNorm | None,
    out: Tensor,
) -> None:
    """Write the rotated queries to `out` `[T, H, D]`, keys and values to their slots."""
    if kv_cache.layout is not Layout.PACKED:
        write_kv_torch(qkv, positions, slot_mapping, cos_sin, kv_cache, head_norm=head_norm, out=out)
        return
    native = native_function(*SIGNATURE)
    assert native is not None, "a packed cache exists only with the native library"
    native(
        DTYPE_CODES[qkv.dtype],
        qkv.data_ptr(),
        qkv.stride(0),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        cos_sin.data_ptr(),
        None if head_norm is None else head_norm.query_weight.data_ptr(),
        None if head_norm is None else head_norm.key_weight.data_ptr(),
        0.0 if head_norm is None else head_norm.eps,
        0.0 if head_norm is None else head_norm.weight_offset,
        kv_cache.keys.data_ptr(),
        kv_cache.values.data_ptr(),
        out.data_ptr(),
        out.shape[0],
        out.shape[1],
        kv_cache.num_kv_heads,
        kv_cache.head_size,
        cos_sin.shape[1],
        kv_cache.block_size,
        padded(kv_cache.block_size),
        padded(kv_cache.head_size),
        None if kv_cache.key_scales is None else kv_cache.key_scales.data_ptr(),
        None if kv_cache.value_scales is None else kv_cache.value_scales.data_ptr(),
    )


def write_kv_torch(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    kv_cache: KVCache,
    *,
    head_norm: HeadNorm | None,
    out: Tensor,
) -> None:
    """Compute `write_kv_cpu` with torch operators, for the plain layout, on any device.

    Reads no tensor on the host.
    """
    head_size, num_kv_heads = kv_cache.head_size, kv_cache.num_kv_heads
    heads = qkv.unflatten(1, (-1, head_size))  # [T, H + 2 * G, D]
    query, key, value = heads.split([out.shape[1], num_kv_heads, num_kv_heads], dim=1)
    if head_norm is not None:
        query = normalised(query, head_norm.query_weight, head_norm.eps, head_norm.weight_offset)
        key = normalised(key, head_norm.key_weight, head_norm.eps, head_norm.weight_offset)
    rope_cpu(query, positions, cos_sin, out=out)
    rotated_key = key.new_empty(key.shape)
    rope_cpu(key, positions, cos_sin, out=rotated_key)
    _store(kv_cache.keys, kv_cache.key_scales, slot_mapping, rotated_key)
    _store(kv_cache.values, kv_cache.value_scales, slot_mapping, value)


def _store(cache: Tensor, scales: Tensor | None, slots: Tensor, heads: Tensor) -> None:
    """Write heads `[T, G, D]` to their slots, unchanged or in 8 bits."""
    if scales is None:
        _put(cache, slots, heads)
        return
    narrow, narrow_scales = to_8_bits(heads, cache.dtype)
    # torch cannot index fp8 on the CPU.
    _put(cache.view(torch.uint8), slots, narrow.view(torch.uint8))
    _put(scales, slots, narrow_scales)


def _put(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows `[T, ...]` to their slots of `cache` `[blocks, block_size, ...]`; those below 0 change nothing.

    They repeat the row of a token that has a slot. If none has, they write what slot 0 has.
    """
    if slots.shape[0] == 0:
        return
    has_slot = slots >= 0
    # Of one dimension: an index without any would be read on the host.
    donor = has_slot.int().argmax(dim=0, keepdim=True)
    source = torch.where(has_slot, torch.arange(len(slots), device=slots.device), donor)
    to = slots[source].clamp(min=0)
    old = cache[:1, :1].flatten(0, 1)
    has_donor = has_slot[donor].view([1] * rows.dim())
    cache[to // cache.shape[1], to % cache.shape[1]] = torch.where(has_donor, rows[source], old)
