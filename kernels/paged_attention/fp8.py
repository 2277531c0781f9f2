"""Keys and values in 8-bit floats (e4m3), with one float32 scale per head and token.

A scale per head and token needs no calibration and cannot overflow: it is the largest magnitude over 448, the largest
e4m3. A head with a NaN or an infinity has the scale infinity, and represents NaN.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round heads `[..., D]` to e4m3 `[..., D]`, nearest, ties to even.

    Return them with their scales `[...]` float32.
    """
    wide = x.float()
    magnitude = torch.where(wide.isnan(), float("inf"), wide.abs())
    largest = magnitude.amax(dim=-1)
    # Divided by a tensor: on a GPU torch multiplies by the rounded inverse of a number, and half of the scales differ.
    scales = largest / torch.full_like(largest, LARGEST)
    divisors = torch.where(scales == 0, 1.0, scales)
    return (wide / divisors.unsqueeze(-1)).to(FP8), scales


def from_fp8(narrow: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values that e4m3 `[..., D]` and scales `[...]` represent."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (narrow.to(wide) * scales.to(wide).unsqueeze(-1)).to(dtype)
