"""Definition of rotary position embedding. Float32 inside; float64 tensors stay float64."""

import torch
from torch import Tensor


def rope_reference(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the first R elements of each head of `x` `[T, N, D]`; `cos_sin` is `[P, R]`."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rotary_size = cos_sin.shape[1]
    cos, sin = cos_sin[positions].to(wide).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R / 2] each
    first, second = x[..., :rotary_size].to(wide).chunk(2, dim=-1)  # [T, N, R / 2] each
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), x[..., rotary_size:]], dim=-1)
