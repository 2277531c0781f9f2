# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false
"""The product of one row in 16 bits with a weight in FP8, in Triton: bound by reading the weight.

As `few_rows.py`: a program takes a few outputs and all of K, without tensor cores. The row is not rounded. A thread
loads sixteen elements at once, which have one scale.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.linear.float8 import SPAN, Float8Weight
from sluice.kernels.tuned import chosen, key_of

_RUN = tl.constexpr(16)
"""Elements that a thread loads at once."""


@dataclass(frozen=True, slots=True)
class Float8RowConfig:
    """Tiling of one product."""

    block_n: int
    """Outputs per program."""

    block_k: int
    num_warps: int


def float8_row_config(*, in_size: int) -> Float8RowConfig:
    """Choose the tiling from the shape of the weight."""
    return Float8RowConfig(block_n=4, block_k=min(2048, max(512, triton.next_power_of_2(in_size))), num_warps=4)


@triton.jit
def _float8_row_kernel(
    out_ptr,  # [N]
    x_ptr,  # [K]
    codes_ptr,  # [N, K] e4m3
    scales_ptr,  # [N, K / SPAN] float32; [N] if SPAN is 0
    bias_ptr,  # [N]; unused unless HAS_BIAS
    N,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per block of N."""
    RUNS: tl.constexpr = BLOCK_K // _RUN
    NUM_SPANS: tl.constexpr = (K + SPAN - 1) // SPAN if SPAN else 1
    first_column = tl.program_id(0).to(tl.int64) * BLOCK_N
    rows = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    has_row = rows < N - first_column
    steps = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    runs = tl.arange(0, RUNS)  # [RUNS]
    codes_ptr += first_column * K
    scales_ptr += first_column * NUM_SPANS

    acc = tl.zeros([BLOCK_N, RUNS], dtype=tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        ks = start + steps
        inside = ks < K
        codes = tl.load(
            codes_ptr + rows[:, None] * K + ks[None, :],
            mask=has_row[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(x_ptr + ks, mask=inside, other=0.0).to(tl.float32)
        product = codes.to(tl.float16).to(tl.float32) * x[None, :]
        sums = tl.sum(product.reshape([BLOCK_N, RUNS, _RUN]), axis=2)
        if SPAN:
            spans = (start + runs * _RUN) // SPAN
            has_span = has_row[:, None] & (spans < NUM_SPANS)[None, :]
            sums *= tl.load(scales_ptr + rows[:, None] * NUM_SPANS + spans[None, :], mask=has_span, other=0.0)
        acc += sums

    out = tl.sum(acc, axis=1)
    if not SPAN:
        out *= tl.load(scales_ptr + rows, mask=has_row, other=0.0)
    if HAS_BIAS:
        out += tl.load(bias_ptr + first_column + rows, mask=has_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + first_column + rows, out.to(out_ptr.dtype.element_ty), mask=has_row)


def float8_row_triton(
    x: Tensor, weight: Float8Weight, bias: Tensor | None, *, out: Tensor, config: Float8RowConfig | None = None
) -> None:
    """Write `x` `[1, K]` times `weight` `[N, K]` transposed, plus `bias` `[N]`, to `out` `[1, N]`.

    `config` overrides the choice by shape (to measure another).
    """
    out_size, in_size = weight.shape
    if config is None:
        config = chosen(x.device, "float8_row", key_of(n=out_size, k=in_size), float8_row_config(in_size=in_size))
    _float8_row_kernel[(triton.cdiv(out_size, config.block_n),)](
        out,
        x,
        weight.codes,
        weight.scales,
        weight.scales if bias is None else bias,
        out_size,
        K=in_size,
        SPAN=0 if weight.scales.shape[1] == 1 else SPAN,
        HAS_BIAS=bias is not None,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
    )
