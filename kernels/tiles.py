"""AMX: tile registers that multiply matrices, which a process must ask for."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from functools import cache

import torch

from kernels.native import native_function


@cache
def may_use_tiles() -> bool:
    """Whether this process may use AMX; asks for it."""
    allow = native_function("sluice_allow_tiles", "p")
    allowed = torch.zeros(1, dtype=torch.int32)
    if allow is not None:
        allow(allowed.data_ptr())
    return bool(allowed)
