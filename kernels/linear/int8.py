"""Weights in int8: what is kept of them, and what they stand for."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch
from torch import Tensor

_QUANTIZED_ROWS = 1024


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` `[N, K]` in int8, and the scale `[N]` float32 of each row: its largest element over 127."""
    narrow = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    # Some rows at a time: floats take four times the memory.
    for first in range(0, weight.shape[0], _QUANTIZED_ROWS):
        rows = slice(first, first + _QUANTIZED_ROWS)
        wide = weight[rows].to(torch.float32, copy=True)
        largest = torch.linalg.vector_norm(wide, ord=torch.inf, dim=1)
        factors = torch.where(largest > 0, 127 / largest, 0.0)
        narrow[rows] = wide.mul_(factors[:, None]).round_()
        scales[rows] = largest / 127
    return narrow, scales


def dequantized(narrow: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that `narrow` and `scales` stand for, rounded to `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (narrow.to(wide) * scales.to(wide)[:, None]).to(dtype)
