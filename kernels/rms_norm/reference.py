"""Definition of RMS normalisation. Float32 inside; float64 tensors stay float64."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, *, eps: float, weight_offset: float = 0.0) -> Tensor:
    """Scale each row of `x` `[T, M]` to unit root mean square, then by `weight_offset + weight`, `[M]`."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_wide = x.to(wide)
    rms = (x_wide.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()  # [T, 1]
    return (x_wide / rms * (weight_offset + weight.to(wide))).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    weight_offset: float = 0.0,
    added_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of `residual + x`, and `residual + x` itself, rounded to their dtype before the norm.

    With `added_weight`, `x` is normalised and rounded before it is added.
    """
    if added_weight is not None:
        x = rms_norm_reference(x, added_weight, eps=eps, weight_offset=weight_offset)
    total = residual + x
    return rms_norm_reference(total, weight, eps=eps, weight_offset=weight_offset), total
