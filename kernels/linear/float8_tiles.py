# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
"""Products of rows, rounded to FP8, with a weight in FP8 on the matrix unit, in Triton.

The matrix unit sums 128 products, with fewer bits than float32 has; these sums are scaled, if each has a scale, and
added in float32. K is summed in parts that a second launch adds: parts depend on the weight's shape alone, so a row's
bits are the same for any number of rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.e4m3 import to_e4m3
from sluice.kernels.linear.float8 import FLOAT8, SPAN, Float8Weight
from sluice.kernels.linear.kernel import PROCESSORS
from sluice.kernels.linear.parts import add_parts, part_size_of, scaled

BLOCK = tl.constexpr(SPAN)
"""Elements of K in a step: those of a weight that share scales."""


@dataclass(frozen=True, slots=True)
class Float8TilesConfig:
    """Tiling of one product. `part_size` determines the bits of the result."""

    block_n: int
    """Outputs per program."""

    block_t: int
    """Rows of x per program."""

    part_size: int
    """Length of a part of K, in whole spans."""

    num_warps: int
    num_stages: int


def float8_tiles_config(*, out_size: int, in_size: int, num_tokens: int) -> Float8TilesConfig:
    """Choose the parts of K from the shape of the weight, and the rows of a tile from their number."""
    part_size = part_size_of(out_size=out_size, in_size=in_size, block_k=SPAN)
    if num_tokens > 64:
        # A sum of all parts takes registers of its own.
        return Float8TilesConfig(128, 64 if part_size < in_size else 128, part_size, num_warps=8, num_stages=4)
    return Float8TilesConfig(64, max(16, triton.next_power_of_2(num_tokens)), part_size, num_warps=4, num_stages=4)


@triton.jit
def _round_rows_kernel(
    codes_ptr,  # [T, K] uint8
    scales_ptr,  # [T] float32
    x_ptr,  # [T, K]
    x_stride_token,
    K,
    BLOCK_K: tl.constexpr,
):
    """One program per row: see `rounded_rows_float8`."""
    token = tl.program_id(0).to(tl.int64)
    ks = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    x = tl.load(x_ptr + token * x_stride_token + ks, mask=ks < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=0)
    is_finite = largest < float("inf")
    scale = tl.div_rn(largest, 448.0)
    tl.store(scales_ptr + token, tl.where(is_finite, scale, float("nan")))
    is_scaled = is_finite & (scale > 0)
    quotients = tl.div_rn(x, tl.zeros_like(x) + tl.where(is_scaled, scale, 1.0))
    tl.store(codes_ptr + token * K + ks, to_e4m3(tl.where(is_scaled, quotients, 0.0)), mask=ks < K)


@triton.jit
def _sum_of_part(
    codes_rows,  # [BLOCK_N, 1]
    scales_rows,  # [BLOCK_N]
    x_rows,  # [1, BLOCK_T]
    has_column,  # [BLOCK_N]
    first_span,
    part_spans,
    K,
    num_spans,
    IS_EVEN: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Return the sum of one part of K, `[BLOCK_N, BLOCK_T]` float32."""
    steps = tl.arange(0, BLOCK)  # [BLOCK]
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for span in range(first_span, first_span + part_spans):
        ks = span * BLOCK + steps
        if HAS_SPANS:
            scales = tl.load(scales_rows + span, mask=has_column & (span < num_spans), other=0.0)
        if IS_EVEN:
            codes = tl.load(codes_rows + ks[None, :])
            x = tl.load(x_rows + ks[:, None])
        else:
            codes = tl.load(codes_rows + ks[None, :], mask=has_column[:, None] & (ks < K)[None, :], other=0.0)
            x = tl.load(x_rows + ks[:, None], mask=(ks < K)[:, None], other=0.0)
        sums = tl.dot(codes, x)
        if HAS_SPANS:
            acc += sums * scales[:, None]
        else:
            acc += sums
    return acc


@triton.jit(do_not_specialize=["T", "num_parts", "part_spans"])
def _float8_tiles_kernel(
    out_ptr,  # [T, N]; float32 [parts, T, N] when IS_SPLIT
    x_ptr,  # [T, K] e4m3
    x_scales_ptr,  # [T] float32
    codes_ptr,  # [N, K] e4m3
    scales_ptr,  # [N, spans] float32; [N] unless HAS_SPANS
    bias_ptr,  # [N]; unused unless HAS_BIAS
    T,
    N,
    K,
    num_spans,
    num_parts,
    part_spans,
    IS_EVEN: tl.constexpr,  # blocks cover N, and parts K, exactly
    HAS_SPANS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program per (block of tokens, block of N); with IS_SPLIT, per part of K too."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    has_column = columns < N
    # Rows beyond T are the last one, and not stored.
    rows = tl.minimum(tokens, T - 1)  # [BLOCK_T]
    codes_rows = codes_ptr + columns[:, None] * K
    scales_rows = scales_ptr + columns * num_spans
    x_rows = x_ptr + rows[None, :] * K
    part = tl.program_id(2)
    acc = _sum_of_part(
        codes_rows, scales_rows, x_rows, has_column, part * part_spans, part_spans, K, num_spans,
        IS_EVEN, HAS_SPANS, BLOCK_N, BLOCK_T,
    )  # fmt: skip
    if HAS_PARTS and not IS_SPLIT:
        for other in range(1, num_parts):
            acc += _sum_of_part(
                codes_rows, scales_rows, x_rows, has_column, other * part_spans, part_spans, K, num_spans,
                IS_EVEN, HAS_SPANS, BLOCK_N, BLOCK_T,
            )  # fmt: skip
    is_stored = has_column[:, None] & (tokens < T)[None, :]
    at = tokens[None, :] * N + columns[:, None]
    if IS_SPLIT:
        # Scaled once all parts are added.
        tl.store(out_ptr + part.to(tl.int64) * T * N + at, acc, mask=is_stored)
    else:
        out = scaled(acc, x_scales_ptr + rows, scales_ptr, bias_ptr, columns, N, True, not HAS_SPANS, HAS_BIAS)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_stored)


def round_rows_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows `[T, K]` in FP8, and their scales `[T]`."""
    num_tokens, in_size = x.shape
    codes = torch.empty(num_tokens, in_size, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(in_size)
    num_warps = min(max(block // 1024, 1), 16)
    _round_rows_kernel[(num_tokens,)](codes, scales, x, x.stride(0), in_size, BLOCK_K=block, num_warps=num_warps)
    return codes.view(FLOAT8), scales


def float8_tiles_triton(
    x: Tensor, weight: Float8Weight, bias: Tensor | None, *, out: Tensor, config: Float8TilesConfig | None = None
) -> None:
    """Write `x` `[T, K]`, rounded, times `weight` `[N, K]` transposed, plus `bias` `[N]`, to `out` `[T, N]`.

    `config` overrides the choice by shape (to test another).
    """
    num_tokens, in_size = x.shape
    out_size, num_spans = weight.scales.shape
    if num_tokens == 0:
        return
    config = config or float8_tiles_config(out_size=out_size, in_size=in_size, num_tokens=num_tokens)
    num_parts = triton.cdiv(in_size, config.part_size)
    num_tiles = triton.cdiv(num_tokens, config.block_t), triton.cdiv(out_size, config.block_n)
    is_split = num_parts > 1 and num_tiles[0] * num_tiles[1] < 2 * PROCESSORS
    target = torch.empty(num_parts, *out.shape, dtype=torch.float32, device=x.device) if is_split else out
    codes, x_scales = round_rows_triton(x)
    has_bias, given_bias = bias is not None, weight.scales if bias is None else bias
    _float8_tiles_kernel[(*num_tiles, num_parts if is_split else 1)](
        target,
        codes,
        x_scales,
        weight.codes,
        weight.scales,
        given_bias,
        num_tokens,
        out_size,
        in_size,
        num_spans,
        num_parts,
        config.part_size // SPAN,
        IS_EVEN=in_size % config.part_size == 0 and out_size % config.block_n == 0,
        HAS_SPANS=num_spans > 1,
        HAS_PARTS=num_parts > 1,
        HAS_BIAS=has_bias,
        IS_SPLIT=is_split,
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if is_split:
        of_columns = weight.scales if num_spans == 1 else None
        add_parts(target, bias, out=out, row_scales=x_scales, column_scales=of_columns)
