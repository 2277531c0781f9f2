"""RMS normalisation (Zhang & Sennrich, 2019), alone and fused with the residual addition before it."""

import torch
from torch import Tensor

from kernels.checks import check, check_rows

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Scale each row of `x` to unit root mean square, then by `weight`. Float32 inside, rounded once.

    Args:
        x: `[T, M]`, float32, float16 or bfloat16; rows may be strided, the last dimension is contiguous.
        weight: `[M]`, contiguous, dtype of `x`.
        eps: added to the mean square.
        out: as `x`; made if None. May be `x` itself.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    _check(x, weight)
    out = torch.empty_like(x) if out is None else out
    _check_like("out", out, x)
    if x.is_cuda:
        from kernels.rms_norm.kernel import rms_norm_triton

        rms_norm_triton(x, weight, eps=eps, out=out)
    else:
        from kernels.rms_norm.cpu import rms_norm_cpu

        rms_norm_cpu(x, weight, eps=eps, out=out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Add `x` to `residual` in place, and return the RMS norm of the sum (of the sum as it is stored).

    Args:
        x: `[T, M]`; not changed unless it is `out`.
        residual: as `x`; becomes `residual + x`.
        weight: `[M]`, contiguous, dtype of `x`.
        eps: added to the mean square.
        out: as `x`; made if None. May be `x` itself, not `residual`.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    _check(x, weight)
    _check_like("residual", residual, x)
    out = torch.empty_like(x) if out is None else out
    _check_like("out", out, x)
    if x.is_cuda:
        from kernels.rms_norm.kernel import add_rms_norm_triton

        add_rms_norm_triton(x, residual, weight, eps=eps, out=out)
    else:
        from kernels.rms_norm.cpu import add_rms_norm_cpu

        add_rms_norm_cpu(x, residual, weight, eps=eps, out=out)
    return out


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
