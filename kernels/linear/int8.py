"""Weights in int8: rounding and widening."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_IN_SIZE = 2**16
"""Largest K of the product in integers on a GPU: up to here products of two int8 do not overflow 32 bits."""

_QUANTIZED_ELEMENTS = 2**16
"""Elements that are in float32 at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """A matrix `[N, K]` in int8, whose product rounds rows to int8, too."""

    codes: Tensor
    """`[N, K]` int8."""

    scales: Tensor
    """`[N]` float32."""

    @property
    def shape(self) -> torch.Size:
        """N and K."""
        return self.codes.shape

    def map(self, change: Callable[[Tensor], Tensor]) -> "Int8Weight":
        """Return the weight of which `change` has selected rows: it is called for each tensor."""
        return Int8Weight(codes=change(self.codes), scales=change(self.scales))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in `dtype`."""
        return dequantized(self.codes, self.scales, dtype)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round `weight` `[N, K]` to int8, with a scale `[N]` float32 per row: its largest magnitude over 127."""
    narrow = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    # A few rows at a time: floats take four times the memory.
    step = max(1, _QUANTIZED_ELEMENTS // max(1, weight.shape[1]))
    for first in range(0, weight.shape[0], step):
        rows = slice(first, first + step)
        wide = weight[rows].to(torch.float32, copy=True)
        largest = torch.linalg.vector_norm(wide, ord=torch.inf, dim=1)
        factors = torch.where(largest > 0, 127 / largest, 0.0)
        narrow[rows] = wide.mul_(factors[:, None]).round_()
        scales[rows] = largest / 127
    return narrow, scales


def rounded_to_int8(weight: Tensor) -> Int8Weight:
    """Round `weight` `[N, K]` as `quantized` does."""
    codes, scales = quantized(weight)
    return Int8Weight(codes=codes, scales=scales)


def dequantized(narrow: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight that `narrow` and `scales` represent, rounded to `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (narrow.to(wide) * scales.to(wide)[:, None]).to(dtype)
