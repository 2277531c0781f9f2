"""Rotary position embedding (Su et al., 2021), in the half-split layout of Llama-shaped models: a part of `write_kv`.

The first R of a head's D elements are rotated by the angles of its token's position; the rest is passed. Element i of
the first half of R and element i of the second half form a pair.
"""

import torch
from torch import Tensor

from sluice.kernels.checks import check

__all__ = ["check_cos_sin"]


def check_cos_sin(cos_sin: Tensor, head_size: int) -> None:
    """Check a table of R/2 cosines, then R/2 sines, for each of P positions against a head size."""
    check(cos_sin.dim() == 2 and cos_sin.dtype == torch.float32, "cos_sin must be [P, R] float32")
    check(cos_sin.is_contiguous(), "cos_sin must be contiguous")
    rotary_size = cos_sin.shape[1]
    check(rotary_size % 2 == 0 and rotary_size <= head_size, "R must be even and <= {}, got {}", head_size, rotary_size)
