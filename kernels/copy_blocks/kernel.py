# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Block copies in one Triton launch for all layers: each program moves a piece of one block as integers.

Only bits are moved: dtype and layout do not matter, and no conversion can change a NaN or an 8-bit float.
"""

import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.copy_blocks import BlockRuns

BLOCK = 2048
"""Units that a program moves: 16 KiB of the widest."""

_WIDEST = 8
_UNITS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _copy_blocks_kernel(
    pairs_ptr,  # [P, 2] int64: source, destination
    runs_ptr,  # [R, 3] int64: address of block 0, bytes from a block to the next, bytes of a block
    UNIT: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per (pair, run, piece of a block)."""
    pair = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(2).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    source = tl.load(pairs_ptr + pair * 2)
    destination = tl.load(pairs_ptr + pair * 2 + 1)
    address = tl.load(runs_ptr + run * 3)
    stride = tl.load(runs_ptr + run * 3 + 1)
    # Both hints hold since all numbers of the table are aligned: they let a thread move 16 bytes at once.
    num_units = tl.multiple_of(tl.load(runs_ptr + run * 3 + 2) // UNIT_BYTES, ALIGNMENT // UNIT_BYTES)
    inside = offsets < num_units

    source_ptr = tl.multiple_of((address + source * stride).to(tl.pointer_type(UNIT)), ALIGNMENT)
    destination_ptr = tl.multiple_of((address + destination * stride).to(tl.pointer_type(UNIT)), ALIGNMENT)
    tl.store(destination_ptr + offsets, tl.load(source_ptr + offsets, mask=inside, other=0), mask=inside)


def copy_blocks_triton(runs: BlockRuns, pairs: Tensor) -> None:
    """Copy as `sluice.kernels.copy_blocks.copy_blocks`.

    `pairs` `[P, 2]` int64, on the caches' device, are already checked.
    """
    num_pairs = pairs.shape[0]
    if num_pairs == 0:
        return
    unit_bytes = min(runs.alignment, _WIDEST)
    grid = (num_pairs, runs.table.shape[0], triton.cdiv(runs.max_bytes // unit_bytes, BLOCK))
    _copy_blocks_kernel[grid](
        pairs,
        runs.table,
        UNIT=_UNITS[unit_bytes],
        UNIT_BYTES=unit_bytes,
        ALIGNMENT=runs.alignment,
        BLOCK_N=BLOCK,
        num_warps=8,
    )
