"""AMX tile registers, which a process must request."""

from functools import cache

import torch

from sluice.kernels.native import native_function


@cache
def may_use_tiles() -> bool:
    """Request AMX for this process; return whether it may use it."""
    allow = native_function("sluice_allow_tiles", "p")
    allowed = torch.zeros(1, dtype=torch.int32)
    if allow is not None:
        allow(allowed.data_ptr())
    return bool(allowed)
