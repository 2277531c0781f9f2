"""RMS normalisation (Zhang & Sennrich, 2019), alone and fused with the preceding residual addition."""

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, weight_offset: float = 0.0, out: Tensor | None = None) -> Tensor:
    """Scale each row of `x` to unit root mean square, then by `weight_offset + weight`. Float32 inside, rounded once.

    Args:
        x: `[T, M]`, float32, float16 or bfloat16; rows may be strided, the last dimension is contiguous.
        weight: `[M]`, contiguous, dtype of `x`.
        eps: added to the mean square.
        weight_offset: 1 if weights are stored minus 1 (Gemma); 16 bits could not hold the sum.
        out: as `x`; allocated if None. May be `x` itself.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    _check(x, weight)
    out = torch.empty_like(x) if out is None else out
    _check_like("out", out, x)
    _compute(x, weight, residual=None, added_weight=None, eps=eps, weight_offset=weight_offset, out=out)
    return out


def add_rms_norm(  # noqa: PLR0913 - a kernel's arguments are its tensors
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    weight_offset: float = 0.0,
    added_weight: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Add `x`, or its own RMS norm, to `residual` in place, and return the RMS norm of the sum (as it is stored).

    If `x` is normalised before it is added, the result of that norm is rounded to the dtype, then the sum, then
    the result of the second norm: as in separate steps, which is transformers' rule for Gemma 2 and 3.

    Args:
        x: `[T, M]`; not changed unless it is `out`.
        residual: as `x`; becomes `residual + x`, or `residual + norm(x)`.
        weight: `[M]`, contiguous, dtype of `x`.
        eps: added to the mean square, of both norms.
        weight_offset: as of `rms_norm`, of both norms.
        added_weight: as `weight`, of the norm of `x`. None: `x` is added unchanged.
        out: as `x`; allocated if None. May be `x` itself, not `residual`.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    _check(x, weight)
    _check_like("residual", residual, x)
    if added_weight is not None:
        _check(x, added_weight)
    out = torch.empty_like(x) if out is None else out
    _check_like("out", out, x)
    _compute(x, weight, residual=residual, added_weight=added_weight, eps=eps, weight_offset=weight_offset, out=out)
    return out


def _compute(  # noqa: PLR0913 - its arguments are the tensors
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor | None,
    added_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    out: Tensor,
) -> None:
    path = path_of("rms_norm", x)
    if path is Path.TRITON:
        from sluice.kernels.rms_norm.kernel import rms_norm_triton as norm
    elif path is Path.TORCH:
        from sluice.kernels.rms_norm.cpu import rms_norm_torch as norm
    else:
        from sluice.kernels.rms_norm.cpu import rms_norm_cpu as norm
    norm(x, weight, residual=residual, added_weight=added_weight, eps=eps, weight_offset=weight_offset, out=out)


def _check(x: Tensor, weight: Tensor) -> None:
    check(x.dim() == 2, "x must be [T, M], got {}", x.shape)
    check(weight.shape == x.shape[1:], "weight must be {}, got {}", x.shape[1:], weight.shape)
    check(weight.dtype == x.dtype, "weight must be {}, got {}", x.dtype, weight.dtype)
    check(weight.is_contiguous(), "weight must be contiguous")
    check_rows("x", x)


def _check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    check(tensor.shape == x.shape, "{} must be {}, got {}", name, x.shape, tensor.shape)
    check(tensor.dtype == x.dtype, "{} must be {}, got {}", name, x.dtype, tensor.dtype)
    check_rows(name, tensor)
