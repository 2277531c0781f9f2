"""Argument checks shared by all operations: one line per check, one sentence per error.

They run for every operation of every layer and step, so a message is formatted only when a check fails.
"""

import torch
from torch import Tensor


def check(holds: bool, problem: str, *arguments: object) -> None:
    """Raise ValueError unless `holds`; `problem` has a `{}` for each of `arguments`."""
    if not holds:
        raise ValueError(problem.format(*(tuple(x) if isinstance(x, torch.Size) else x for x in arguments)))


def check_rows(name: str, x: Tensor) -> None:
    """Check that the last dimension of `x` is contiguous, so that a row is a pointer and a length."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension")
