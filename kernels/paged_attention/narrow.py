"""Keys and values in 8 bits, with one float32 scale per head and token: floats (e4m3) on a GPU, integers on a CPU.

A scale per head and token needs no calibration and cannot overflow: it is the largest magnitude over the largest
number of the format. A head with a NaN or an infinity has the scale infinity, and represents NaN.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
INT8 = torch.int8
LARGEST = {FP8: 448.0, INT8: 127.0}


def to_8_bits(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round heads `[..., D]` to e4m3 or int8 `[..., D]`, nearest, ties to even.

    Return them with their scales `[...]` float32.
    """
    wide = x.float()
    magnitude = torch.where(wide.isnan(), float("inf"), wide.abs())
    largest = magnitude.amax(dim=-1)
    # Divided by a tensor: on a GPU torch multiplies by the rounded inverse of a number, and half of the scales differ.
    scales = largest / torch.full_like(largest, LARGEST[dtype])
    divisors = torch.where(scales == 0, 1.0, scales)
    quotients = wide / divisors.unsqueeze(-1)
    return (quotients.round().nan_to_num(0) if dtype == INT8 else quotients).to(dtype), scales


def from_8_bits(narrow: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values that e4m3 or int8 `[..., D]` and scales `[...]` represent."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (narrow.to(wide) * scales.to(wide).unsqueeze(-1)).to(dtype)
