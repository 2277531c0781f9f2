"""RMS normalisation on the CPU: torch's operator."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it


def rms_norm_cpu(x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> None:
    """Write the norm of `x` `[T, M]` to `out`."""
    out.copy_(F.rms_norm(x, weight.shape, weight, eps))


def add_rms_norm_cpu(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> None:
    """Add `x` to `residual` in place and write the norm of the sum to `out`."""
    residual.add_(x)
    rms_norm_cpu(residual, weight, eps=eps, out=out)
