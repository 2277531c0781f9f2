"""Definition of RMS and layer normalisation. Float32 inside; float64 tensors stay float64."""

import torch
from torch import Tensor


def rms_norm_reference(
    x: Tensor, weight: Tensor, *, eps: float, weight_offset: float = 0.0, is_centered: bool = False
) -> Tensor:
    """Scale each row of `x` `[T, M]` to unit root mean square, then by `weight_offset + weight`, `[M]`.

    With `is_centered`, first subtract its mean.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_wide = x.to(wide)
    if is_centered:
        x_wide = x_wide - x_wide.mean(dim=-1, keepdim=True)
    rms = (x_wide.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()  # [T, 1]
    return (x_wide / rms * (weight_offset + weight.to(wide))).to(x.dtype)


def add_rms_norm_reference(  # noqa: PLR0913 - a kernel's arguments are its tensors
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    is_centered: bool = False,
    added_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of `residual + x`, and `residual + x` itself, rounded to their dtype before the norm.

    With `added_weight`, `x` is normalised and rounded before it is added. Without `weight`, both are the sum.
    """
    if added_weight is not None:
        x = rms_norm_reference(x, added_weight, eps=eps, weight_offset=weight_offset)
    total = residual + x
    if weight is None:
        return total, total
    return rms_norm_reference(total, weight, eps=eps, weight_offset=weight_offset, is_centered=is_centered), total
