# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
"""The product of one row with a weight of 4 or 8 bits, in Triton: bound by reading the weight.

As in `few_rows.py` a program takes a few outputs and all of K, without tensor cores. A thread loads four words of a
group at once. What the biases of codes add to a sum of products, a multiple of the sum of the row's elements, is
subtracted once for these words.

Two rows take more instructions than the tiles of `word_tiles.py`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.linear.word_codes import as_integers, biased_code, unpacked
from sluice.kernels.linear.words import BIAS_BITS, BIASES, WordWeight
from sluice.kernels.tuned import chosen, key_of

_WIDE = 8192
"""Outputs from which a program takes eight: there are enough programs, and each reads the row's elements once."""


@dataclass(frozen=True, slots=True)
class WordRowConfig:
    """Tiling of one product."""

    block_n: int
    """Outputs per program."""

    block_k: int
    num_warps: int


def word_row_config(*, out_size: int, in_size: int, num_bits: int) -> WordRowConfig:
    """Choose the tiling from the shape of the weight."""
    block_k = min(16_384 // num_bits, max(512, triton.next_power_of_2(in_size)))
    return WordRowConfig(block_n=8 if out_size >= _WIDE else 4, block_k=block_k, num_warps=4)


@triton.jit
def _add_quads(
    acc,  # [BLOCK_N, QUADS]
    dot,  # [BLOCK_N, WORDS]
    even,  # [WORDS]
    odd,  # [WORDS]
    scales,  # [BLOCK_N, QUADS]
    minimums,  # [BLOCK_N, QUADS]
    EVEN_BIAS: tl.constexpr,
    ODD_BIAS: tl.constexpr,
):
    """Scale the sums of four words each, and add them."""
    BLOCK_N: tl.constexpr = acc.shape[0]
    QUADS: tl.constexpr = acc.shape[1]
    dot = tl.sum(dot.reshape([BLOCK_N, QUADS, 4]), axis=2)
    even = tl.sum(even.reshape([QUADS, 4]), axis=1)
    odd = tl.sum(odd.reshape([QUADS, 4]), axis=1)
    acc += (dot - (even * EVEN_BIAS + odd * ODD_BIAS)[None, :]) * scales
    return acc + (even + odd)[None, :] * minimums


@triton.jit(do_not_specialize=["even_bits", "odd_bits"])
def _word_row_kernel(
    out_ptr,  # [N]
    x_ptr,  # [K]
    codes_ptr,  # [N, K * BITS / 32] int32
    pairs_ptr,  # [N, K / SPAN] integers: scales and minimums
    bias_ptr,  # [N]; unused unless HAS_BIAS
    N,
    even_bits,
    odd_bits,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    EVEN_BIAS: tl.constexpr,
    ODD_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per block of N."""
    WORDS: tl.constexpr = BLOCK_K * BITS // 32
    QUADS: tl.constexpr = WORDS // 4
    first_column = tl.program_id(0).to(tl.int64) * BLOCK_N
    rows = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    has_row = rows < N - first_column
    words = tl.arange(0, WORDS)  # [WORDS]
    elements = words // BITS * 32 + words % BITS  # of their first codes
    quad_elements = tl.arange(0, QUADS) * (128 // BITS)  # [QUADS]
    codes_ptr += first_column * (K * BITS // 32)
    pairs_ptr += first_column * (K // SPAN)

    acc = tl.zeros([BLOCK_N, QUADS], dtype=tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        inside = start + elements < K
        has_quad = has_row[:, None] & (start + quad_elements < K)[None, :]
        codes = tl.load(
            codes_ptr + rows[:, None] * (K * BITS // 32) + start * BITS // 32 + words[None, :],
            mask=has_row[:, None] & inside[None, :],
            other=0,
            eviction_policy="evict_first",
        )
        spans = rows[:, None] * (K // SPAN) + ((start + quad_elements) // SPAN)[None, :]
        scales, minimums = unpacked(tl.load(pairs_ptr + spans, mask=has_quad, other=0))

        dot = tl.zeros([BLOCK_N, WORDS], dtype=tl.float32)
        even = tl.zeros([WORDS], dtype=tl.float32)
        odd = even
        for code in tl.static_range(32 // BITS):
            x = tl.load(x_ptr + start + elements + code * BITS, mask=inside, other=0.0).to(tl.float32)
            dot += biased_code(codes, even_bits, odd_bits, code, BITS) * x[None, :]
            if code % 2 == 0:
                even += x
            else:
                odd += x
        acc = _add_quads(acc, dot, even, odd, scales, minimums, EVEN_BIAS, ODD_BIAS)

    out = tl.sum(acc, axis=1)
    if HAS_BIAS:
        out += tl.load(bias_ptr + first_column + rows, mask=has_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + first_column + rows, out.to(out_ptr.dtype.element_ty), mask=has_row)


def word_row_triton(
    x: Tensor, weight: WordWeight, bias: Tensor | None, *, out: Tensor, config: WordRowConfig | None = None
) -> None:
    """Write `x` `[1, K]` times `weight` `[N, K]` transposed, plus `bias` `[N]`, to `out` `[1, N]`.

    `config` overrides the choice by shape (to measure another).
    """
    (out_size, in_size), bits = weight.shape, weight.num_bits
    if config is None:
        key = key_of(n=out_size, k=in_size, bits=bits)
        rule = word_row_config(out_size=out_size, in_size=in_size, num_bits=bits)
        config = chosen(x.device, "word_row", key, rule)
    even_bias, odd_bias = BIASES[bits]
    _word_row_kernel[(triton.cdiv(out_size, config.block_n),)](
        out,
        x,
        weight.codes,
        as_integers(weight.scales),
        weight.scales if bias is None else bias,
        out_size,
        *BIAS_BITS[bits],
        K=in_size,
        SPAN=weight.span,
        BITS=bits,
        EVEN_BIAS=even_bias,
        ODD_BIAS=odd_bias,
        HAS_BIAS=bias is not None,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
    )
