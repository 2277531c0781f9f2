# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Products in Triton whose bits for a row depend on the row and the weight alone, for any number of rows.

K is divided into parts of a fixed size. Each part is summed in steps of a fixed size, and the parts are added in their
order. For few rows each part has a program, and a second kernel adds them; for many a program walks all parts of its
tile. Only the rows of a tile, and who adds the parts, are chosen by the number of rows: neither changes what is added
to what.

The weight is the left operand: a matrix unit takes 64 rows on the left and as few as 8 on the right, and a decode has
many weights and few rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PROCESSORS = 132
"""Programs that keep an H100 or H200 busy. Fixed: the parts depend on it."""

_LEAST_PART = 256
"""Smallest part of K: a shorter one ends before its loads are in full flow."""


@dataclass(frozen=True, slots=True)
class InvariantConfig:
    """Tiling of one product. `block_k` and `part_size` determine the bits of the result."""

    block_n: int
    """Outputs per program."""

    block_t: int
    """Rows of x per program."""

    block_k: int
    part_size: int
    """Length of a part of K, in whole blocks."""

    num_warps: int
    num_stages: int


def invariant_config(*, out_size: int, in_size: int, num_tokens: int, element_bytes: int) -> InvariantConfig:
    """Choose the parts of K from the shape of the weight, and the rows of a tile from their number.

    Nothing is measured: another worker may continue this one's jobs.
    """
    block_n, block_k = (64, 32) if element_bytes == 4 else (128, 64)
    num_blocks = triton.cdiv(out_size, block_n)
    num_parts = max(1, min((PROCESSORS + num_blocks // 2) // num_blocks, in_size // _LEAST_PART))
    part_size = triton.cdiv(triton.cdiv(in_size, num_parts), block_k) * block_k
    if element_bytes == 4:
        return InvariantConfig(block_n, 16, block_k, part_size, num_warps=4, num_stages=2)
    if num_tokens <= 16:
        return InvariantConfig(block_n, 16, block_k, part_size, num_warps=4, num_stages=5)
    if num_tokens <= 64:
        return InvariantConfig(block_n, 64, block_k, part_size, num_warps=4, num_stages=4)
    return InvariantConfig(block_n, 128, block_k, part_size, num_warps=8, num_stages=4)


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


@triton.jit(do_not_specialize=["T", "num_parts"])
def _invariant_kernel(
    out_ptr,  # [T, N]; float32 [parts, T, N] when IS_SPLIT
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K], contiguous
    bias_ptr,  # [N]; unused unless HAS_BIAS
    T,
    x_stride_token,
    N,
    K,
    num_parts,
    part_size,
    IS_EVEN: tl.constexpr,  # blocks cover N, and parts K, exactly
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per (block of tokens, block of N); with IS_SPLIT, per part of K too."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    has_token = (tokens < T)[None, :]
    has_column = (columns < N)[:, None]
    weight_rows = weight_ptr + columns[:, None] * K  # [BLOCK_N, 1]
    x_rows = x_ptr + tokens[None, :] * x_stride_token  # [1, BLOCK_T]
    at = tokens[None, :] * N + columns[:, None]

    if IS_SPLIT:
        part = tl.program_id(2)
        acc = _sum_of_part(
            weight_rows, x_rows, has_column, has_token, part * part_size, part_size, K,
            IS_EVEN, BLOCK_N, BLOCK_T, BLOCK_K,
        )  # fmt: skip
        tl.store(out_ptr + part.to(tl.int64) * T * N + at, acc, mask=has_column & has_token)
    else:
        total = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
        for part in range(num_parts):
            total += _sum_of_part(
                weight_rows, x_rows, has_column, has_token, part * part_size, part_size, K,
                IS_EVEN, BLOCK_N, BLOCK_T, BLOCK_K,
            )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=has_column & has_token)


@triton.jit(do_not_specialize=["T", "num_parts"])
def _add_parts_kernel(
    out_ptr,  # [T, N]
    partial_ptr,  # [parts, T, N] float32
    bias_ptr,  # [N]; unused unless HAS_BIAS
    T,
    N,
    num_parts,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per (token, block of N): the parts, added in their order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = columns < N
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for part in range(num_parts):
        total += tl.load(partial_ptr + (part * T.to(tl.int64) + token) * N + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def invariant_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor, config: InvariantConfig | None = None
) -> None:
    """Write `x` `[T, K]` times `weight` `[N, K]`, contiguous, transposed, plus `bias` `[N]`, to `out` `[T, N]`.

    `config` overrides the choice by shape (to test another).
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
    is_split = num_parts > 1 and num_tiles[0] * num_tiles[1] < PROCESSORS
    target = torch.empty(num_parts, *out.shape, dtype=torch.float32, device=x.device) if is_split else out
    has_bias, given_bias = bias is not None, weight if bias is None else bias
    _invariant_kernel[(*num_tiles, num_parts if is_split else 1)](
        target,
        x,
        weight,
        given_bias,
        num_tokens,
        x.stride(0),
        out_size,
        in_size,
        num_parts,
        config.part_size,
        IS_EVEN=in_size % config.part_size == 0 and out_size % config.block_n == 0,
        HAS_BIAS=has_bias and not is_split,
        IS_SPLIT=is_split,
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if is_split:
        block = min(1024, triton.next_power_of_2(out_size))
        _add_parts_kernel[(num_tokens, triton.cdiv(out_size, block))](
            out, target, given_bias, num_tokens, out_size, num_parts, HAS_BIAS=has_bias, BLOCK_N=block, num_warps=4
        )
