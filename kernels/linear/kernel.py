# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Products of few rows with weights in int8, in Triton: a decode step is bound by reading weights from memory.

A tile of the weight is the left operand, widened in registers just before it is multiplied (every int8 is exact in
float16 and bfloat16); the rows are the right operand: the matrix unit needs 64 on the left but only 16 on the right,
and a decode has many weights and few rows. Scales are applied once, to the finished sums.

If a weight has too few rows to occupy every processor, K is split into parts, which a second kernel sums in order. The
split depends only on the weight's shape, never on the number of rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.tuned import key_of, tuned

WANTED_PROGRAMS = 256
"""About two per processor of a large GPU: enough loads in flight to saturate its memory."""


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Tiling of one product."""

    block_n: int
    """Rows of the weight per program."""

    block_k: int
    num_parts: int
    """Parts of K, each of whole blocks."""

    num_warps: int
    num_stages: int


def product_config(*, out_size: int, in_size: int, element_bytes: int) -> ProductConfig:
    """Choose the tiling from the shape of the weight and the width of the rows, never from their number."""
    block_n = 32 if element_bytes == 4 else 64
    block_k = 32 if element_bytes == 4 else 128
    num_blocks = triton.cdiv(out_size, block_n)
    num_steps = triton.cdiv(in_size, block_k)
    # A part has eight steps or more: fewer do not fill the software pipeline.
    num_parts = max(1, min(WANTED_PROGRAMS // num_blocks, num_steps // 8))
    return ProductConfig(block_n, block_k, num_parts, num_warps=4, num_stages=2 if element_bytes == 4 else 4)


def product_key(*, out_size: int, in_size: int, element_bytes: int) -> str:
    """Return the table key of a configuration."""
    return key_of(n=out_size, k=in_size, bytes=element_bytes)


def _chosen_config(x: Tensor, out_size: int) -> ProductConfig:
    """Return the configuration measured on this GPU for such a weight, or the rules' choice."""
    kind = {"out_size": out_size, "in_size": x.shape[1], "element_bytes": x.element_size()}
    measured = tuned(x.device, "int8_product", product_key(**kind))
    return product_config(**kind) if measured is None else ProductConfig(*measured)


@triton.jit(do_not_specialize=["T"])
def _int8_product_kernel(
    out_ptr,  # [T, N]; float32 [parts, T, N], unscaled, when IS_PARTIAL
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K] int8, contiguous
    scales_ptr,  # [N] float32
    bias_ptr,  # [N]; unused unless HAS_BIAS
    T,
    x_stride_token,
    N: tl.constexpr,
    K: tl.constexpr,
    PART_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per (block of N, part of K, block of tokens)."""
    columns = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    part = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(2).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    steps = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    has_column = columns < N
    has_token = tokens < T
    weight_rows = weight_ptr + columns[:, None] * K  # [BLOCK_N, 1]
    x_rows = x_ptr + tokens[None, :] * x_stride_token  # [1, BLOCK_T]

    first = part * PART_K
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for start in range(0, PART_K, BLOCK_K):
        ks = first + start + steps  # [BLOCK_K]
        if K % PART_K == 0 and PART_K % BLOCK_K == 0 and N % BLOCK_N == 0:
            weight = tl.load(weight_rows + ks[None, :], eviction_policy="evict_first")
        else:
            inside = has_column[:, None] & (ks < K)[None, :]
            weight = tl.load(weight_rows + ks[None, :], mask=inside, other=0, eviction_policy="evict_first")
        x = tl.load(x_rows + ks[:, None], mask=has_token[None, :] & (ks < K)[:, None], other=0.0)  # [BLOCK_K, BLOCK_T]
        acc = tl.dot(weight.to(x.dtype), x, acc=acc, input_precision="ieee")

    inside_out = has_column[:, None] & has_token[None, :]
    if IS_PARTIAL:
        out_ptrs = out_ptr + (part * T + tokens[None, :]) * N + columns[:, None]
        tl.store(out_ptrs, acc, mask=inside_out)
    else:
        out = acc * tl.load(scales_ptr + columns, mask=has_column, other=0.0)[:, None]
        if HAS_BIAS:
            out += tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)[:, None]
        out_ptrs = out_ptr + tokens[None, :] * N + columns[:, None]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside_out)


@triton.jit(do_not_specialize=["T"])
def _sum_parts_kernel(
    out_ptr,  # [T, N]
    partial_ptr,  # [parts, T, N] float32
    scales_ptr,  # [N] float32
    bias_ptr,  # [N]; unused unless HAS_BIAS
    T,
    N: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per (token, block of N): the parts in order, then scale and bias."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = columns < N
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for part in range(NUM_PARTS):
        total += tl.load(partial_ptr + (part * T.to(tl.int64) + token) * N + columns, mask=inside, other=0.0)
    out = total * tl.load(scales_ptr + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


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

    `config` overrides the choice by shape (to measure another).
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
    block_t = min(max(16, triton.next_power_of_2(num_tokens)), 64)
    is_partial = num_parts > 1
    target = out
    if is_partial:
        target = torch.empty(num_parts, num_tokens, out_size, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(out_size, config.block_n), num_parts, triton.cdiv(num_tokens, block_t))
    _int8_product_kernel[grid](
        target,
        x,
        weight,
        scales,
        scales if bias is None else bias,
        num_tokens,
        x.stride(0),
        N=out_size,
        K=in_size,
        PART_K=part_size,
        HAS_BIAS=bias is not None,
        IS_PARTIAL=is_partial,
        BLOCK_N=config.block_n,
        BLOCK_T=block_t,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if is_partial:
        block = min(1024, triton.next_power_of_2(out_size))
        _sum_parts_kernel[(num_tokens, triton.cdiv(out_size, block))](
            out,
            target,
            scales,
            scales if bias is None else bias,
            num_tokens,
            N=out_size,
            NUM_PARTS=num_parts,
            HAS_BIAS=bias is not None,
            BLOCK_N=block,
            num_warps=4,
        )
