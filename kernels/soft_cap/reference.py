"""Definition of the soft cap. Float32 inside; float64 tensors stay float64."""

import torch
from torch import Tensor


def soft_cap_reference(x: Tensor, *, cap: float) -> Tensor:
    """Return `cap * tanh(x / cap)` of each element."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (cap * torch.tanh(x.to(wide) / cap)).to(x.dtype)
