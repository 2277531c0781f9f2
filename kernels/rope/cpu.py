"""Rotary position embedding on the CPU: torch operators."""

import torch
from torch import Tensor


def rope_cpu(x: Tensor, positions: Tensor, cos_sin: Tensor, *, out: Tensor) -> None:
    """Write `x` `[T, N, D]`, its first R elements rotated, to `out`."""
    rotary_size = cos_sin.shape[1]
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R / 2] each
    first, second = x[..., :rotary_size].float().chunk(2, dim=-1)  # [T, N, R / 2] each
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    out[..., :rotary_size] = rotated
    if rotary_size < x.shape[2]:
        out[..., rotary_size:] = x[..., rotary_size:]
