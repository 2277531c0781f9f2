# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Products in Triton whose bits for a row depend on the row and the weight alone, for any number of rows.

K is divided into parts of a fixed size. Each part is summed in steps of a fixed size, and the parts are added in their
order. For few rows each part has a program, and the last of a tile to finish adds them; for many a program walks all
parts of its tile. Only the tile, and who adds the parts, are chosen by the number of rows: neither changes what is
added to what. The program that has the sums adds the bias and applies the gate, so a product is one launch.

The weight is the left operand: a matrix unit takes 64 rows on the left and as few as 8 on the right, and a decode has
many weights and few rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.gated_activation import Activation
from sluice.kernels.gated_activation.kernel import gated

ENOUGH_PROGRAMS = 96
"""Programs that read at the memory's rate on an H200, whose processors can read faster than their share."""

_WHOLE_SIZE = 1024
"""K up to which it is not divided: a part more takes longer to add than it saves."""

_LEAST_PART = 512
"""Smallest part of K: a shorter one ends before its loads are in full flow."""

_TILES = {
    16: ((128, 16, 4, 5), (64, 16, 4, 10)),
    64: ((128, 64, 4, 4), (64, 64, 4, 7)),
    128: ((128, 128, 8, 4), (64, 128, 4, 4)),
    256: ((128, 256, 8, 4), (128, 128, 8, 4), (64, 128, 4, 4)),
}
"""By the most rows: outputs, rows, warps and stages of tiles, the largest first."""

_MOST_SUMS = 128 * 256
"""What a program's registers hold."""


@dataclass(frozen=True, slots=True)
class InvariantConfig:
    """Tiling of one product. `block_k` and `part_size` determine the bits of the result."""

    block_n: int
    """Rows of the weight per program; of a gated product, as many of the gate as of what it gates."""

    block_t: int
    """Rows of x per program."""

    block_k: int
    part_size: int
    """Length of a part of K, in whole blocks."""

    num_warps: int
    num_stages: int


def invariant_config(*, out_size: int, in_size: int, num_tokens: int, element_bytes: int) -> InvariantConfig:
    """Choose the parts of K from the shape of the weight, and the tile also from the number of rows.

    Nothing is measured: another worker may continue this one's jobs.
    """
    block_k = 32 if element_bytes == 4 else 64
    num_parts = _num_parts(out_size, in_size)
    part_size = triton.cdiv(triton.cdiv(in_size, num_parts), block_k) * block_k
    if element_bytes == 4:
        return InvariantConfig(64, 16, block_k, part_size, num_warps=4, num_stages=2)
    tiles = _TILES[next((rows for rows in _TILES if num_tokens <= rows), max(_TILES))]
    occupying = [
        (block_n, block_t, num_warps, num_stages)
        for block_n, block_t, num_warps, num_stages in tiles
        if num_parts * triton.cdiv(out_size, block_n) * triton.cdiv(num_tokens, block_t) >= ENOUGH_PROGRAMS
        and min(num_parts, 2) * block_n * block_t <= _MOST_SUMS
    ]
    block_n, block_t, num_warps, num_stages = (occupying or tiles[-1:])[0]
    return InvariantConfig(block_n, block_t, block_k, part_size, num_warps, num_stages)


def _num_parts(out_size: int, in_size: int) -> int:
    """Return the parts of K with which the largest tiles occupy the GPU, or one if small tiles do without."""
    if in_size <= _WHOLE_SIZE or triton.cdiv(out_size, 64) >= ENOUGH_PROGRAMS:
        return 1
    num_blocks = -(-out_size // 128)
    # A power of two mostly divides K.
    return min(1 << ((ENOUGH_PROGRAMS - 1) // num_blocks).bit_length(), in_size // _LEAST_PART)


@triton.jit
def _sum_of_part(
    weight_rows,  # [BLOCK_N, 1]
    x_rows,  # [1, BLOCK_T]
    has_column,  # [BLOCK_N, 1]
    has_token,  # [1, BLOCK_T]
    start,
    part_size,
    K,
    IS_EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the sum of one part of K, `[BLOCK_N, BLOCK_T]` float32."""
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for first in range(start, start + part_size, BLOCK_K):
        ks = first + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        if IS_EVEN:
            weight = tl.load(weight_rows + ks[None, :])
            x = tl.load(x_rows + ks[:, None], mask=has_token, other=0.0)
        else:
            inside = ks < K
            weight = tl.load(weight_rows + ks[None, :], mask=has_column & inside[None, :], other=0.0)
            x = tl.load(x_rows + ks[:, None], mask=has_token & inside[:, None], other=0.0)
        acc = tl.dot(weight, x, acc=acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["T"])
def _invariant_kernel(
    out_ptr,  # [T, N]; [T, N / 2] with an activation
    partial_ptr,  # [tiles, NUM_PARTS, BLOCK_N, BLOCK_T] float32; unused unless IS_SPLIT
    arrived_ptr,  # [tiles] int32, zeros before and after; unused unless IS_SPLIT
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K], contiguous
    bias_ptr,  # [N], or None
    T,
    x_stride_token,
    N,
    K,
    part_size,
    ACTIVATION: tl.constexpr,  # of the first half of N, which gates the second; or None
    NUM_PARTS: tl.constexpr,
    IS_EVEN: tl.constexpr,  # blocks cover N, and parts K, exactly
    IS_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per (block of tokens, block of N); with IS_SPLIT, per part of K too."""
    BLOCK_OUT: tl.constexpr = BLOCK_N if ACTIVATION is None else BLOCK_N // 2
    rows = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    first_out = tl.program_id(1).to(tl.int64) * BLOCK_OUT
    num_out = N if ACTIVATION is None else N // 2
    columns = first_out + rows % BLOCK_OUT  # [BLOCK_N]
    has_column = columns < num_out
    columns += rows // BLOCK_OUT * num_out
    has_token = (tokens < T)[None, :]
    weight_rows = weight_ptr + columns[:, None] * K  # [BLOCK_N, 1]
    x_rows = x_ptr + tokens[None, :] * x_stride_token  # [1, BLOCK_T]

    first_part = tl.program_id(2) if IS_SPLIT else 0
    total = _sum_of_part(
        weight_rows, x_rows, has_column[:, None], has_token, first_part * part_size, part_size, K,
        IS_EVEN, BLOCK_N, BLOCK_T, BLOCK_K,
    )  # fmt: skip
    if IS_SPLIT:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        at = rows[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        tile_ptr = partial_ptr + tile * (NUM_PARTS * BLOCK_N * BLOCK_T) + at  # [BLOCK_N, BLOCK_T]
        tl.store(tile_ptr + first_part * (BLOCK_N * BLOCK_T), total)
        # All threads have stored before one of them reports it, with a release and an acquire.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") < NUM_PARTS - 1:
            return
        tl.store(arrived_ptr + tile, 0)
        total = tl.load(tile_ptr, cache_modifier=".cg")
        for part in tl.static_range(1, NUM_PARTS):
            total += tl.load(tile_ptr + part * (BLOCK_N * BLOCK_T), cache_modifier=".cg")
    elif NUM_PARTS > 1:
        for part in range(1, NUM_PARTS):
            total += _sum_of_part(
                weight_rows, x_rows, has_column[:, None], has_token, part * part_size, part_size, K,
                IS_EVEN, BLOCK_N, BLOCK_T, BLOCK_K,
            )  # fmt: skip

    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)[:, None]
    out = total.to(out_ptr.dtype.element_ty)
    if ACTIVATION is not None:
        # Of what a product without the gate returns.
        halves = tl.trans(tl.reshape(out, [2, BLOCK_OUT, BLOCK_T]), 1, 2, 0)
        gate, up = tl.split(halves)  # [BLOCK_OUT, BLOCK_T]
        out = gated(gate.to(tl.float32), up.to(tl.float32), ACTIVATION).to(out.dtype)
    out_columns = first_out + tl.arange(0, BLOCK_OUT)  # [BLOCK_OUT]
    out_ptrs = out_ptr + tokens[None, :] * num_out + out_columns[:, None]
    tl.store(out_ptrs, out, mask=(out_columns < num_out)[:, None] & has_token)


def arrivals(device: torch.device) -> Tensor:
    """Make the counters of the programs of each tile that have finished their part of K, for one weight.

    Each product leaves zeros, so a recorded step needs no memset. Products of one weight must not run at once.
    """
    return torch.zeros(ENOUGH_PROGRAMS, dtype=torch.int32, device=device)


def invariant_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    arrived: Tensor,
    out: Tensor,
    activation: Activation | None = None,
    config: InvariantConfig | None = None,
) -> None:
    """Write `x` `[T, K]` times `weight` `[N, K]`, contiguous, transposed, plus `bias` `[N]`, to `out` `[T, N]`.

    With an `activation` the first half of columns gates the second, and `out` is `[T, N / 2]`. `arrived` is of
    `arrivals`, for this weight. `config` overrides the choice by shape (to test another).
    """
    num_tokens, in_size = x.shape
    out_size = weight.shape[0]
    if num_tokens == 0:
        return
    config = config or invariant_config(
        out_size=out_size, in_size=in_size, num_tokens=num_tokens, element_bytes=x.element_size()
    )
    num_parts = triton.cdiv(in_size, config.part_size)
    num_tiles = triton.cdiv(num_tokens, config.block_t), triton.cdiv(out_size, config.block_n)
    is_split = num_parts > 1 and num_tiles[0] * num_tiles[1] < ENOUGH_PROGRAMS
    sums = (*num_tiles, num_parts, config.block_n, config.block_t) if is_split else (0,)
    _invariant_kernel[(*num_tiles, num_parts if is_split else 1)](
        out,
        torch.empty(sums, dtype=torch.float32, device=x.device),
        arrived,
        x,
        weight,
        bias,
        num_tokens,
        x.stride(0),
        out_size,
        in_size,
        config.part_size,
        ACTIVATION=activation,
        NUM_PARTS=num_parts,
        IS_EVEN=in_size % config.part_size == 0 and out_size % config.block_n == 0,
        IS_SPLIT=is_split,
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
