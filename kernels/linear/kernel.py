# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
"""Products of rows with weights in int8, in Triton and in integers: a decode is bound by reading weights from memory.

A row becomes numbers with a fixed point, 22 bits below the row's largest, in three digits of 8 bits. The matrix unit
multiplies each digit with the weight, int8 by int8, straight from shared memory. Nothing is widened, which takes more
instructions per weight than the memory's rate leaves time for. The sums are exact, so the bits of a row depend neither
on the number of rows nor on tiles and parts of K. Only the row is rounded, by at most 2**-22 of its largest element,
and the result.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.tuned import chosen, key_of

PROCESSORS = 132
"""Of an H100 or H200. The rules below were measured on an H200."""

NUM_DIGITS = tl.constexpr(3)
_PLACES = tl.constexpr(4)
"""Digits of a row in a tile, a power of two: the last one is zero."""

_SMALLEST_EXPONENT = tl.constexpr(24)
"""Biased. Rows whose largest is below 2**-103 are rounded as if it were that: its inverse must be a float."""

_ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a number below 2**22 it leaves the nearest integer in the last bits."""


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Tiling of one product."""

    block_n: int
    """Rows of the weight per program."""

    block_t: int
    """Rows of x per program."""

    block_k: int
    num_parts: int
    """Parts of K, each of whole blocks."""

    num_warps: int
    num_stages: int


def product_config(*, out_size: int, in_size: int, num_tokens: int) -> ProductConfig:
    """Choose the tiling from the shape of the product. It changes no bits."""
    num_blocks = triton.cdiv(out_size, 64)
    programs_per_processor = 2
    if num_tokens > 16 and num_blocks * triton.cdiv(num_tokens, 32) > 2 * PROCESSORS:
        config = ProductConfig(128, 32, 128, num_parts=1, num_warps=8, num_stages=3)
    elif num_tokens > 16:
        config = ProductConfig(64, 32, 128, num_parts=1, num_warps=4, num_stages=4)
    elif num_blocks > PROCESSORS:
        config = ProductConfig(128, 16, 128, num_parts=1, num_warps=4, num_stages=4)
    else:
        programs_per_processor = 1
        is_narrow = num_blocks * triton.cdiv(num_tokens, 8) <= PROCESSORS
        block_t, num_stages = (8, 5) if is_narrow else (16, 4)
        config = ProductConfig(64, block_t, 256, num_parts=1, num_warps=4, num_stages=num_stages)
    num_programs = triton.cdiv(out_size, config.block_n) * triton.cdiv(num_tokens, config.block_t)
    # A part has sixteen steps or more: adding parts is another launch.
    most_parts = min(programs_per_processor * PROCESSORS // num_programs, in_size // (16 * config.block_k))
    return replace(config, num_parts=max(1, most_parts))


def _chosen_config(x: Tensor, out_size: int) -> ProductConfig:
    """Return the configuration measured on this GPU for such a product, or the rules' choice."""
    num_tokens, in_size = x.shape
    key = key_of(n=out_size, k=in_size, rows=max(8, triton.next_power_of_2(num_tokens)))
    rule = product_config(out_size=out_size, in_size=in_size, num_tokens=num_tokens)
    return chosen(x.device, "int8_product", key, rule)


@triton.jit(do_not_specialize=["T"])
def _split_rows_kernel(
    digits_ptr,  # [NUM_DIGITS, T, K] int8, the highest first
    row_scales_ptr,  # [T] float32
    x_ptr,  # [T, K]
    T,
    x_stride_token,
    K,
    BLOCK_K: tl.constexpr,
):
    """One program per row: x[t] is nearly row_scales[t] times the number that its digits, -128 to 127, form.

    A row with a NaN or an infinity has zeros and the scale NaN.
    """
    token = tl.program_id(0).to(tl.int64)
    ks = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    inside = ks < K
    x = tl.load(x_ptr + token * x_stride_token + ks, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=0)
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    is_finite = exponent < 255
    exponent = tl.minimum(tl.maximum(exponent, _SMALLEST_EXPONENT), 254)
    # Powers of two, made from their exponents: 2**21 over that of the largest, and its inverse.
    factor = ((254 + 21 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = ((exponent - 21) << 23).to(tl.float32, bitcast=True)
    tl.store(row_scales_ptr + token, tl.where(is_finite, scale, float("nan")))
    rounded = tl.where(is_finite, x * factor, 0.0) + _ROUNDER
    number = rounded.to(tl.int32, bitcast=True) - 0x4B400000  # the bits of _ROUNDER
    digits = digits_ptr + token * K + ks
    plane = T.to(tl.int64) * K
    for place in tl.static_range(NUM_DIGITS - 1):
        low = ((number + 128) & 255) - 128
        tl.store(digits + (NUM_DIGITS - 1 - place) * plane, low.to(tl.int8), mask=inside)
        number = (number - low) >> 8
    tl.store(digits, number.to(tl.int8), mask=inside)


@triton.jit
def _scaled(high, low, row_scales_ptr, scales_ptr, bias_ptr, tokens, columns, T, N, HAS_BIAS: tl.constexpr):
    """Scale exact sums, 2**16 * high + low, both `[BLOCK_N, BLOCK_T]` int32, and add the bias; float32."""
    # A sum has one form only before it is rounded, whatever parts it came from.
    high += low >> 16
    low &= 0xFFFF
    has_column = columns < N
    out = high.to(tl.float32) * 65536.0 + low.to(tl.float32)
    out = out * tl.load(row_scales_ptr + tokens, mask=tokens < T, other=0.0)[None, :]
    out = out * tl.load(scales_ptr + columns, mask=has_column, other=0.0)[:, None]
    if HAS_BIAS:
        out += tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)[:, None]
    return out


@triton.jit(do_not_specialize=["T"])
def _int8_product_kernel(
    out_ptr,  # [T, N]; int32 [parts, 2, T, N], high and low sums, when IS_PARTIAL
    digits_ptr,  # [NUM_DIGITS, T, K] int8
    row_scales_ptr,  # [T] float32
    weight_ptr,  # [N, K] int8, contiguous
    scales_ptr,  # [N] float32
    bias_ptr,  # [N]; unused unless HAS_BIAS
    T,
    N,
    K,
    part_size,
    IS_EVEN: tl.constexpr,  # blocks cover N, and parts K, exactly
    HAS_BIAS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per (block of tokens, block of N, part of K).

    The weight is the left operand: the matrix unit needs 64 on the left but only 8 on the right, and a decode has many
    weights and few rows. Column j * BLOCK_T + t of the right operand is digit j of token t.
    """
    first_token = tl.program_id(0).to(tl.int64) * BLOCK_T
    tokens = first_token + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    part = tl.program_id(2).to(tl.int64)
    steps = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    places = tl.arange(0, _PLACES * BLOCK_T)  # [_PLACES * BLOCK_T]
    digit = places // BLOCK_T
    digit_tokens = first_token + places % BLOCK_T
    is_digit = ((digit_tokens < T) & (digit < NUM_DIGITS))[None, :]
    digit_rows = digits_ptr + ((digit * T.to(tl.int64) + digit_tokens) * K)[None, :]
    weight_rows = weight_ptr + columns[:, None] * K  # [BLOCK_N, 1]
    has_column = (columns < N)[:, None]

    acc = tl.zeros([BLOCK_N, _PLACES * BLOCK_T], dtype=tl.int32)
    first = part * part_size
    for start in range(first, first + part_size, BLOCK_K):
        ks = start + steps  # [BLOCK_K]
        if IS_EVEN:
            weight = tl.load(weight_rows + ks[None, :], eviction_policy="evict_first")
            x = tl.load(digit_rows + ks[:, None], mask=is_digit, other=0)  # [BLOCK_K, _PLACES * BLOCK_T]
        else:
            inside = ks < K
            weight = tl.load(weight_rows + ks[None, :], mask=has_column & inside[None, :], other=0)
            x = tl.load(digit_rows + ks[:, None], mask=is_digit & inside[:, None], other=0)
        acc = tl.dot(weight, x, acc=acc, out_dtype=tl.int32)

    # The digits together, in two halves of 16 bits and carries.
    is_first = (digit == 0)[None, :]
    is_second = (digit == 1)[None, :]
    high = tl.where(is_first, acc, tl.where(is_second, acc >> 8, 0))
    low = tl.where(is_first, 0, tl.where(is_second, (acc & 0xFF) << 8, acc))
    high = tl.sum(high.reshape([BLOCK_N, _PLACES, BLOCK_T]), axis=1)  # [BLOCK_N, BLOCK_T]
    low = tl.sum(low.reshape([BLOCK_N, _PLACES, BLOCK_T]), axis=1)
    inside_out = has_column & (tokens < T)[None, :]
    at = tokens[None, :] * N + columns[:, None]
    if IS_PARTIAL:
        plane = T.to(tl.int64) * N
        tl.store(out_ptr + 2 * part * plane + at, high, mask=inside_out)
        tl.store(out_ptr + (2 * part + 1) * plane + at, low, mask=inside_out)
    else:
        out = _scaled(high, low, row_scales_ptr, scales_ptr, bias_ptr, tokens, columns, T, N, HAS_BIAS)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside_out)


@triton.jit(do_not_specialize=["T", "num_parts"])
def _sum_parts_kernel(
    out_ptr,  # [T, N]
    partial_ptr,  # [parts, 2, T, N] int32, high and low sums
    row_scales_ptr,  # [T] float32
    scales_ptr,  # [N] float32
    bias_ptr,  # [N]; unused unless HAS_BIAS
    T,
    N,
    num_parts,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per (token, block of N): the sum of the parts, then scales and bias."""
    tokens = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)  # [1]
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = (columns < N)[:, None]
    at = tokens[None, :] * N + columns[:, None]  # [BLOCK_N, 1]
    plane = T.to(tl.int64) * N
    high = tl.zeros([BLOCK_N, 1], dtype=tl.int32)
    low = tl.zeros([BLOCK_N, 1], dtype=tl.int32)
    for part in range(num_parts):
        high += tl.load(partial_ptr + 2 * part * plane + at, mask=inside, other=0)
        low += tl.load(partial_ptr + (2 * part + 1) * plane + at, mask=inside, other=0)
    out = _scaled(high, low, row_scales_ptr, scales_ptr, bias_ptr, tokens, columns, T, N, HAS_BIAS)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _widen_kernel(
    out_ptr,  # [N, K], contiguous
    weight_ptr,  # [N, K] int8, contiguous
    scales_ptr,  # [N] float32
    K,
    BLOCK_K: tl.constexpr,
):
    """One program per (row, block of K): widen int8 weights."""
    row = tl.program_id(0).to(tl.int64)
    ks = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    inside = ks < K
    weight = tl.load(weight_ptr + row * K + ks, mask=inside, other=0).to(tl.float32)
    tl.store(out_ptr + row * K + ks, (weight * tl.load(scales_ptr + row)).to(out_ptr.dtype.element_ty), mask=inside)


def widen_triton(weight: Tensor, scales: Tensor, *, out: Tensor) -> None:
    """Write the weight that `weight` `[N, K]` int8 and `scales` `[N]` represent to `out` `[N, K]`, contiguous."""
    num_rows, in_size = weight.shape
    block = min(2048, triton.next_power_of_2(in_size))
    _widen_kernel[(num_rows, triton.cdiv(in_size, block))](out, weight, scales, in_size, BLOCK_K=block, num_warps=4)


def _split_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the digits `[NUM_DIGITS, T, K]` of rows, and their scales `[T]`."""
    num_tokens, in_size = x.shape
    digits = torch.empty(NUM_DIGITS.value, num_tokens, in_size, dtype=torch.int8, device=x.device)
    row_scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(in_size)
    num_warps = min(max(block // 1024, 1), 16)
    _split_rows_kernel[(num_tokens,)](
        digits, row_scales, x, num_tokens, x.stride(0), in_size, BLOCK_K=block, num_warps=num_warps
    )
    return digits, row_scales


def int8_product_triton(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    *,
    out: Tensor,
    config: ProductConfig | None = None,
) -> None:
    """Write `x` `[T, K]` times the weight that `weight` `[N, K]` int8 and `scales` `[N]` represent to `out` `[T, N]`.

    K is at most `int8.MAX_IN_SIZE`. `config` overrides the choice by shape (to measure another).
    """
    num_tokens, in_size = x.shape
    out_size = weight.shape[0]
    if num_tokens == 0:
        return
    if config is None:
        config = _chosen_config(x, out_size)
    steps_of_part = triton.cdiv(triton.cdiv(in_size, config.block_k), config.num_parts)
    part_size = steps_of_part * config.block_k
    num_parts = triton.cdiv(in_size, part_size)
    digits, row_scales = _split_rows(x)
    has_bias, given_bias = bias is not None, scales if bias is None else bias
    target = out
    if num_parts > 1:
        target = torch.empty(num_parts, 2, num_tokens, out_size, dtype=torch.int32, device=x.device)
    grid = (triton.cdiv(num_tokens, config.block_t), triton.cdiv(out_size, config.block_n), num_parts)
    _int8_product_kernel[grid](
        target,
        digits,
        row_scales,
        weight,
        scales,
        given_bias,
        num_tokens,
        out_size,
        in_size,
        part_size,
        IS_EVEN=in_size % part_size == 0 and out_size % config.block_n == 0,
        HAS_BIAS=has_bias,
        IS_PARTIAL=num_parts > 1,
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_parts > 1:
        block = min(1024, triton.next_power_of_2(out_size))
        sum_grid = (num_tokens, triton.cdiv(out_size, block))
        sizes = (num_tokens, out_size, num_parts)
        _sum_parts_kernel[sum_grid](
            out, target, row_scales, scales, given_bias, *sizes, HAS_BIAS=has_bias, BLOCK_N=block, num_warps=4
        )
