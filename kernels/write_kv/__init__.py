"""Operations between the query-key-value product and attention: normalise heads, rotate, store keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows
from sluice.kernels.paged_attention.layout import KVCache
from sluice.kernels.rope import check_cos_sin

__all__ = ["HeadNorm", "write_kv"]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of each query and key head over D, before the rotation (as in Qwen3 and Gemma 3)."""

    query_weight: Tensor
    """`[D]`, contiguous, dtype of the model."""

    key_weight: Tensor
    eps: float
    weight_offset: float = 0.0
    """See `sluice.kernels.rms_norm.rms_norm`."""


def write_kv(  # noqa: PLR0913 - a kernel's arguments are its tensors
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    kv_cache: KVCache,
    *,
    head_norm: HeadNorm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise (optionally) and rotate queries and keys; store keys and values; return the queries.

    The norm's result is rounded to the dtype before it is rotated, as in separate steps.

    Args:
        qkv: `[T, (H + 2 * G) * D]`: query heads, key heads, value heads. Rows may be strided. Not changed.
        positions: `[T]` int64.
        slot_mapping: `[T]` int64, `block_id * block_size + offset`, each at most once; a negative one stores nothing.
        cos_sin: `[P, R]` float32, see `sluice.kernels.rope`.
        kv_cache: of G key-value heads, dtype of `qkv` or fp8. Only the given slots are written.
        head_norm: weights of the heads' norm; None if the model has none.
        out: `[T, H, D]`, contiguous, dtype of `qkv`; allocated if None.

    Returns:
        `out`, the queries.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    head_size = kv_cache.head_size
    num_heads = _num_query_heads(qkv, kv_cache)
    check_cos_sin(cos_sin, head_size)
    shape = (qkv.shape[0], num_heads, head_size)
    for name, tensor in {"positions": positions, "slot_mapping": slot_mapping}.items():
        check(tensor.shape == qkv.shape[:1] and tensor.dtype == torch.int64, "{} must be [T] int64", name)
    if head_norm is not None:
        for weight in (head_norm.query_weight, head_norm.key_weight):
            check(weight.shape == (head_size,) and weight.dtype == qkv.dtype, "norm weights must be [D] {}", qkv.dtype)
    out = qkv.new_empty(shape) if out is None else out
    check(out.shape == torch.Size(shape) and out.is_contiguous(), "out must be {}, contiguous", shape)
    check(out.dtype == qkv.dtype, "out is {}, qkv {}", out.dtype, qkv.dtype)
    path = path_of("write_kv", qkv)
    if path is Path.TRITON:
        from sluice.kernels.write_kv.kernel import write_kv_triton as write
    elif path is Path.TORCH:
        from sluice.kernels.write_kv.cpu import write_kv_torch as write
    else:
        from sluice.kernels.write_kv.cpu import write_kv_cpu as write
    write(qkv, positions, slot_mapping, cos_sin, kv_cache, head_norm=head_norm, out=out)
    return out


def _num_query_heads(qkv: Tensor, kv_cache: KVCache) -> int:
    check(qkv.dim() == 2, "qkv must be [T, (H + 2 * G) * D], got {}", qkv.shape)
    kv_cache.check_dtype("qkv", qkv.dtype)
    check_rows("qkv", qkv)
    num_heads = qkv.shape[1] // kv_cache.head_size - 2 * kv_cache.num_kv_heads
    total = (num_heads + 2 * kv_cache.num_kv_heads) * kv_cache.head_size
    check(num_heads > 0 and total == qkv.shape[1], "a row of qkv must have (H + 2 * G) * D elements: {}", qkv.shape[1])
    return num_heads
