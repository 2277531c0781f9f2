"""RMS normalisation (Zhang & Sennrich, 2019), alone and fused with the preceding residual addition.

With `is_centered` it is layer normalisation without a bias (Ba et al., 2016): the mean is subtracted first.
"""

from typing import TypedDict

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows

__all__ = ["NormOptions", "add_rms_norm", "rms_norm"]


class NormOptions(TypedDict):
    """How the norms of a model are computed; see `add_rms_norm`."""

    eps: float
    weight_offset: float
    is_centered: bool


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    weight_offset: float = 0.0,
    is_centered: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Scale each row of `x` to unit root mean square, then by `weight_offset + weight`. Float32 inside, rounded once.

    Args:
        x: `[T, M]`, float32, float16 or bfloat16; rows may be strided, the last dimension is contiguous.
        weight: `[M]`, contiguous, dtype of `x`.
        eps: added to the mean square.
        weight_offset: 1 if weights are stored minus 1 (Gemma); 16 bits could not hold the sum.
        is_centered: subtract the mean of a row first; `weight_offset` must be 0.
        out: as `x`; allocated if None. May be `x` itself.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    _check(x, weight)
    check(not (is_centered and weight_offset), "a layer norm has no offset")
    out = torch.empty_like(x) if out is None else out
    _check_like("out", out, x)
    options: NormOptions = {"eps": eps, "weight_offset": weight_offset, "is_centered": is_centered}
    _compute(x, weight, options, residual=None, added_weight=None, out=out)
    return out


def add_rms_norm(  # noqa: PLR0913 - a kernel's arguments are its tensors
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    is_centered: bool = False,
    added_weight: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Add `x`, or its own RMS norm, to `residual` in place, and return the RMS norm of the sum (as it is stored).

    If `x` is normalised before it is added, the result of that norm is rounded to the dtype, then the sum, then
    the result of the second norm: as in separate steps, which is transformers' rule for Gemma 2 and 3.

    Args:
        x: `[T, M]`; not changed unless it is `out`.
        residual: as `x`; becomes `residual + x`, or `residual + norm(x)`.
        weight: `[M]`, contiguous, dtype of `x`. None: the sum is not normalised, and `out` is not used.
        eps: added to the mean square, of both norms.
        weight_offset: as of `rms_norm`, of both norms.
        is_centered: as of `rms_norm`; `x` is then added unchanged.
        added_weight: as `weight`, of the norm of `x`. None: `x` is added unchanged.
        out: as `x`; allocated if None. May be `x` itself, not `residual`.

    Returns:
        `out`; without a `weight`, `residual`.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    _check(x, weight)
    _check(x, added_weight)
    _check_like("residual", residual, x)
    check(not (is_centered and (weight_offset or added_weight is not None)), "a layer norm has no offset or added norm")
    out = residual if weight is None else torch.empty_like(x) if out is None else out
    _check_like("out", out, x)
    options: NormOptions = {"eps": eps, "weight_offset": weight_offset, "is_centered": is_centered}
    _compute(x, weight, options, residual=residual, added_weight=added_weight, out=out)
    return out


def _compute(
    x: Tensor,
    weight: Tensor | None,
    options: NormOptions,
    *,
    residual: Tensor | None,
    added_weight: Tensor | None,
    out: Tensor,
) -> None:
    path = path_of("rms_norm", x)
    if path is Path.TRITON:
        from sluice.kernels.rms_norm.kernel import rms_norm_triton as norm
    elif path is Path.TORCH:
        from sluice.kernels.rms_norm.cpu import rms_norm_torch as norm
    else:
        from sluice.kernels.rms_norm.cpu import rms_norm_cpu as norm
    norm(x, weight, residual=residual, added_weight=added_weight, **options, out=out)


def _check(x: Tensor, weight: Tensor | None) -> None:
    check(x.dim() == 2, "x must be [T, M], got {}", x.shape)
    check_rows("x", x)
    if weight is None:
        return
    check(weight.shape == x.shape[1:], "weight must be {}, got {}", x.shape[1:], weight.shape)
    check(weight.dtype == x.dtype, "weight must be {}, got {}", x.dtype, weight.dtype)
    check(weight.is_contiguous(), "weight must be contiguous")


def _check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    check(tensor.shape == x.shape, "{} must be {}, got {}", name, x.shape, tensor.shape)
    check(tensor.dtype == x.dtype, "{} must be {}, got {}", name, x.dtype, tensor.dtype)
    check_rows(name, tensor)
