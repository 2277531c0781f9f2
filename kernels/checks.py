"""Checks that every operation makes of its arguments: one line at the call, one sentence in the error.

They run for every operation of every layer and step: a sentence is put together only when it is needed.
"""

import torch
from torch import Tensor


def check(holds: bool, problem: str, *found: object) -> None:
    """Raise ValueError unless `holds`; `problem` has a `{}` for each of `found`."""
    if not holds:
        raise ValueError(problem.format(*(tuple(x) if isinstance(x, torch.Size) else x for x in found)))


def check_rows(name: str, x: Tensor) -> None:
    """Check that the last dimension of `x` is contiguous, so that a row can be read by a pointer and a length."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension")
