"""Rotary position embedding (Su et al., 2021), in the half-split layout of Llama-shaped models."""

import torch
from torch import Tensor

from sluice.kernels.checks import check, check_rows

__all__ = ["rope"]


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rotate the first R of each head's D elements by the angles of its token's position; copy the rest.

    Element i of the first half of R and element i of the second half form a pair.

    Args:
        x: `[T, N, D]`, float32, float16 or bfloat16; tokens and heads may be strided, D is contiguous.
        positions: `[T]` int64.
        cos_sin: `[P, R]` float32, contiguous: R/2 cosines, then R/2 sines, per position. R is even and at most D.
        out: as `x`; allocated if None. May be `x` itself.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    check(x.dim() == 3, "x must be [T, N, D], got {}", x.shape)
    check(positions.shape == x.shape[:1], "positions must be {}, got {}", x.shape[:1], positions.shape)
    check_cos_sin(cos_sin, x.shape[2])
    check_rows("x", x)
    out = torch.empty_like(x) if out is None else out
    check(out.shape == x.shape and out.dtype == x.dtype, "out must be {} {}", x.shape, x.dtype)
    check_rows("out", out)
    if x.is_cuda:
        from sluice.kernels.rope.kernel import rope_triton

        rope_triton(x, positions, cos_sin, out=out)
    else:
        from sluice.kernels.rope.cpu import rope_cpu

        rope_cpu(x, positions, cos_sin, out=out)
    return out


def check_cos_sin(cos_sin: Tensor, head_size: int) -> None:
    """Check a table of cosines and sines against a head size."""
    check(cos_sin.dim() == 2 and cos_sin.dtype == torch.float32, "cos_sin must be [P, R] float32")
    check(cos_sin.is_contiguous(), "cos_sin must be contiguous")
    rotary_size = cos_sin.shape[1]
    check(rotary_size % 2 == 0 and rotary_size <= head_size, "R must be even and <= {}, got {}", head_size, rotary_size)
