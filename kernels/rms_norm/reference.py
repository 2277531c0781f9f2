"""What RMS normalisation means. Float32 inside; float64 tensors stay float64."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Scale each row of `x` `[T, M]` to unit root mean square, then by `weight` `[M]`."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_wide = x.to(wide)
    rms = (x_wide.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()  # [T, 1]
    return (x_wide / rms * weight.to(wide)).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of `residual + x`, and `residual + x` itself, rounded to their dtype before the norm."""
    total = residual + x
    return rms_norm_reference(total, weight, eps=eps), total
