"""Soft cap of logits, which approach a limit and never pass it (Gemma 2, arXiv 2408.00118)."""

from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check

__all__ = ["soft_cap"]


def soft_cap(x: Tensor, *, cap: float) -> Tensor:
    """Change each element of `x` to `cap * tanh(x / cap)`, in place. Float32 inside, rounded once.

    An element's result does not depend on its position.

    Args:
        x: `[R, V]`, float32, float16 or bfloat16, contiguous.
        cap: above 0.

    Returns:
        `x`.

    Raises:
        ValueError: `x` is not contiguous, or `cap` is not above 0.
    """
    check(cap > 0, "cap must be above 0, got {}", cap)
    check(x.is_contiguous(), "x must be contiguous")
    path = path_of("soft_cap", x)
    if path is Path.TRITON:
        from sluice.kernels.soft_cap.kernel import soft_cap_triton as limit
    elif path is Path.TORCH:
        from sluice.kernels.soft_cap.cpu import soft_cap_torch as limit
    else:
        from sluice.kernels.soft_cap.cpu import soft_cap_cpu as limit
    limit(x, cap=cap)
    return x
