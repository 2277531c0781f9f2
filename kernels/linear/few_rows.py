# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Products of one to four rows in Triton, with weights in 16 bits or in int8: bound by reading the weights.

A program takes two outputs and all of K. Its products stay apart in registers and are summed once, at the end: no
split, no second launch, and enough programs to fill a GPU for any weight.

The bits of a row are the same for any number of rows up to four.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.tuned import chosen, key_of


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """Tiling of one product."""

    block_n: int
    """Outputs per program."""

    block_k: int
    num_warps: int


def few_rows_config(*, in_size: int) -> FewRowsConfig:
    """Choose the tiling from the shape of the weight, never from the number of rows."""
    block_k = min(2048 if in_size >= 4096 else 1024, triton.next_power_of_2(in_size))
    return FewRowsConfig(block_n=2, block_k=block_k, num_warps=4)


@triton.jit
def _add_products(acc, weight, x_ptr, ks, inside):
    """Add a row's products with a tile of the weight, `[BLOCK_N, BLOCK_K]`."""
    x = tl.load(x_ptr + ks, mask=inside, other=0.0).to(tl.float32)
    return acc + weight * x[None, :]


@triton.jit
def _store_row(out_ptr, acc, columns, is_stored, scales, bias):
    """Sum, scale and store one row of a program's outputs."""
    out = tl.sum(acc, axis=1) * scales + bias
    tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["T"])
def _few_rows_kernel(
    out_ptr,  # [T, N]
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K], contiguous
    scales_ptr,  # [N] float32; unused unless HAS_SCALES
    bias_ptr,  # [N]; unused unless HAS_BIAS
    T,
    x_stride_token,
    N,
    K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per block of N. Rows beyond T are computed as the last one, and not stored."""
    columns = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    has_column = columns < N
    steps = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    # Eight elements per thread in int8 too, as of the rows: otherwise these go through shared memory in each step.
    weight_steps = tl.max_contiguous(steps, 8)
    last = T.to(tl.int64) - 1
    x1_ptr = x_ptr + tl.minimum(1, last) * x_stride_token
    x2_ptr = x_ptr + tl.minimum(2, last) * x_stride_token
    x3_ptr = x_ptr + tl.minimum(3, last) * x_stride_token

    acc0 = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    for start in tl.static_range(0, K, BLOCK_K):
        ks = start + steps
        inside = ks < K
        weight = tl.load(
            weight_ptr + columns[:, None] * K + start + weight_steps[None, :],
            mask=has_column[:, None] & inside[None, :],
            other=0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        acc0 = _add_products(acc0, weight, x_ptr, ks, inside)
        if BLOCK_T > 1:
            acc1 = _add_products(acc1, weight, x1_ptr, ks, inside)
        if BLOCK_T > 2:
            acc2 = _add_products(acc2, weight, x2_ptr, ks, inside)
            acc3 = _add_products(acc3, weight, x3_ptr, ks, inside)

    scales = tl.full([BLOCK_N], 1.0, tl.float32)
    if HAS_SCALES:
        scales = tl.load(scales_ptr + columns, mask=has_column, other=0.0)
    bias = tl.zeros([BLOCK_N], dtype=tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)
    _store_row(out_ptr, acc0, columns, has_column, scales, bias)
    if BLOCK_T > 1:
        _store_row(out_ptr + N, acc1, columns, has_column & (last >= tl.full([BLOCK_N], 1, tl.int64)), scales, bias)
    if BLOCK_T > 2:
        rows = tl.full([BLOCK_N], 2, tl.int64)
        _store_row(out_ptr + 2 * N, acc2, columns, has_column & (last >= rows), scales, bias)
        _store_row(out_ptr + 3 * N, acc3, columns, has_column & (last > rows), scales, bias)


def few_rows_triton(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    *,
    out: Tensor,
    config: FewRowsConfig | None = None,
) -> None:
    """Write `x` `[T, K]`, one to four rows, times `weight` `[N, K]` to `out` `[T, N]`.

    With `scales` `[N]` the weight is in int8. `config` overrides the choice by shape (to measure another).
    """
    num_tokens, in_size = x.shape
    out_size = weight.shape[0]
    if config is None:
        key = key_of(n=out_size, k=in_size, bytes=weight.element_size())
        config = chosen(x.device, "few_rows", key, few_rows_config(in_size=in_size))
    _few_rows_kernel[(triton.cdiv(out_size, config.block_n),)](
        out,
        x,
        weight,
        weight if scales is None else scales,
        weight if bias is None else bias,
        num_tokens,
        x.stride(0),
        out_size,
        K=in_size,
        HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None,
        BLOCK_T=triton.next_power_of_2(num_tokens),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
    )
