"""Definition of writing keys and values: the steps one after another, a loop over slots. Plain layout only."""

from torch import Tensor

from sluice.kernels.paged_attention.layout import KVCache
from sluice.kernels.paged_attention.narrow import to_8_bits
from sluice.kernels.rms_norm.reference import rms_norm_reference
from sluice.kernels.rope.reference import rope_reference
from sluice.kernels.write_kv import HeadNorm


def write_kv_reference(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    kv_cache: KVCache,
    *,
    head_norm: HeadNorm | None = None,
) -> Tensor:
    """Normalise and rotate queries and keys, store keys and values in `kv_cache`, return the queries `[T, H, D]`."""
    heads = qkv.unflatten(1, (-1, kv_cache.head_size))  # [T, H + 2 * G, D]
    num_kv_heads = kv_cache.num_kv_heads
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if head_norm is not None:
        eps, offset = head_norm.eps, head_norm.weight_offset
        query = rms_norm_reference(query, head_norm.query_weight, eps=eps, weight_offset=offset)
        key = rms_norm_reference(key, head_norm.key_weight, eps=eps, weight_offset=offset)
    query = rope_reference(query, positions, cos_sin)
    key = rope_reference(key, positions, cos_sin)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, kv_cache.block_size)
            _store(kv_cache.keys[block, offset], kv_cache.key_scales, (block, offset), key[token])
            _store(kv_cache.values[block, offset], kv_cache.value_scales, (block, offset), value[token])
    return query


def _store(slot: Tensor, scales: Tensor | None, at: tuple[int, int], heads: Tensor) -> None:
    """Write heads `[G, D]` to a slot `[G, D]`, unchanged or in 8 bits."""
    if scales is None:
        slot.copy_(heads)
    else:
        narrow, scales[at] = to_8_bits(heads, slot.dtype)
        slot.copy_(narrow)
