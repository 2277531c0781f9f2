# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
"""Parts of K that programs of a product sum each by itself, and their sum, in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.linear.kernel import PROCESSORS

_LEAST_PART = 1024
"""Smallest part of K: a part has several steps, and adding parts is another launch."""


def part_size_of(*, out_size: int, in_size: int, block_k: int) -> int:
    """Return the length of a part of K, in whole blocks. It depends on the weight's shape alone."""
    num_parts = max(1, min(2 * PROCESSORS // triton.cdiv(out_size, 64), in_size // _LEAST_PART))
    return triton.cdiv(triton.cdiv(in_size, num_parts), block_k) * block_k


@triton.jit
def scaled(
    acc,  # [BLOCK_N, BLOCK_T]
    row_scales,  # [BLOCK_T] pointers
    column_scales_ptr,  # [N]
    bias_ptr,  # [N]
    columns,  # [BLOCK_N]
    N,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_COLUMN_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Scale sums of all parts, and add the bias; what it has not is unused."""
    if HAS_ROW_SCALES:
        acc *= tl.load(row_scales)[None, :]
    if HAS_COLUMN_SCALES:
        acc *= tl.load(column_scales_ptr + columns, mask=columns < N, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit(do_not_specialize=["T", "num_parts"])
def _add_parts_kernel(
    out_ptr,  # [T, N]
    partial_ptr,  # [parts, T, N] float32
    row_scales_ptr,  # [T] float32; as the next two, unused unless it has them
    column_scales_ptr,  # [N] float32
    bias_ptr,  # [N]
    T,
    N,
    num_parts,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_COLUMN_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per (token, block of N): the parts, added in their order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = columns < N
    total = tl.load(partial_ptr + token * N + columns, mask=inside, other=0.0)
    for part in range(1, num_parts):
        total += tl.load(partial_ptr + (part * T.to(tl.int64) + token) * N + columns, mask=inside, other=0.0)
    row = row_scales_ptr + token + tl.arange(0, 1)  # [1]
    out = scaled(
        total[:, None], row, column_scales_ptr, bias_ptr, columns, N, HAS_ROW_SCALES, HAS_COLUMN_SCALES, HAS_BIAS
    )
    at = out_ptr + token * N + columns[:, None]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def add_parts(
    parts: Tensor,
    bias: Tensor | None,
    *,
    out: Tensor,
    row_scales: Tensor | None = None,
    column_scales: Tensor | None = None,
) -> None:
    """Write the sum of `parts` `[parts, T, N]` float32, in their order, to `out` `[T, N]`.

    It is multiplied by `row_scales` `[T]`, then by `column_scales` `[N]`, and `bias` `[N]` is added.
    """
    num_parts, num_tokens, out_size = parts.shape
    block = min(1024, triton.next_power_of_2(out_size))
    _add_parts_kernel[(num_tokens, triton.cdiv(out_size, block))](
        out,
        parts,
        parts if row_scales is None else row_scales,
        parts if column_scales is None else column_scales,
        parts if bias is None else bias,
        num_tokens,
        out_size,
        num_parts,
        HAS_ROW_SCALES=row_scales is not None,
        HAS_COLUMN_SCALES=column_scales is not None,
        HAS_BIAS=bias is not None,
        BLOCK_N=block,
        num_warps=4,
    )
