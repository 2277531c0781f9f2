# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false
"""Products of rows with weights of 4 or 8 bits on the matrix unit, in Triton, and the widening of such a weight.

A tile of codes becomes numbers in the dtype of the rows in registers, rounded once, as those of the dequantized weight
are. The elements of one place in all words are multiplied at once, with the elements of the rows that belong to them.

K is summed in parts that a second launch adds: parts and steps depend on the weight's shape alone, so a row's bits are
the same for any number of rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.linear.kernel import PROCESSORS
from sluice.kernels.linear.parts import add_parts, part_size_of
from sluice.kernels.linear.word_codes import as_integers, biased_code, unpacked
from sluice.kernels.linear.words import BIAS_BITS, BIASES, WordWeight


@dataclass(frozen=True, slots=True)
class WordTilesConfig:
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


def word_tiles_config(*, out_size: int, in_size: int, num_tokens: int, num_bits: int) -> WordTilesConfig:
    """Choose the parts of K from the shape of the weight, and the rows of a tile from their number."""
    block_k = 1024 // num_bits
    part_size = part_size_of(out_size=out_size, in_size=in_size, block_k=block_k)
    if num_tokens > 64:
        return WordTilesConfig(128, 128, block_k, part_size, num_warps=8, num_stages=2)
    block_t = max(16, triton.next_power_of_2(num_tokens))
    return WordTilesConfig(64, block_t, block_k, part_size, num_warps=4, num_stages=3)


@triton.jit
def _of_words(pairs, WORDS: tl.constexpr):
    """Repeat pairs of spans `[BLOCK_N, SPANS]` for the words of each, `[BLOCK_N, WORDS]`."""
    BLOCK_N: tl.constexpr = pairs.shape[0]
    SPANS: tl.constexpr = pairs.shape[1]
    return pairs[:, :, None].broadcast_to([BLOCK_N, SPANS, WORDS // SPANS]).reshape([BLOCK_N, WORDS])


@triton.jit
def _sum_of_part(
    codes_rows,  # [BLOCK_N, 1]
    pairs_rows,  # [BLOCK_N, 1]
    x_rows,  # [1, BLOCK_T]
    has_column,  # [BLOCK_N, 1]
    first_block,
    num_blocks,
    K,
    IS_EVEN: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    EVEN_BITS: tl.constexpr,
    ODD_BITS: tl.constexpr,
    EVEN_BIAS: tl.constexpr,
    ODD_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the sum of one part of K, `[BLOCK_N, BLOCK_T]` float32."""
    WORDS: tl.constexpr = BLOCK_K * BITS // 32
    SPANS: tl.constexpr = BLOCK_K // SPAN if SPAN else 1
    words = tl.arange(0, WORDS)  # [WORDS]
    elements = words // BITS * 32 + words % BITS  # of their first codes
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for block in range(first_block, first_block + num_blocks):
        codes_at = codes_rows + (block * WORDS + words)[None, :]
        pairs_at = pairs_rows + ((block * SPANS if SPAN else 0) + tl.arange(0, SPANS))[None, :]
        first = block * BLOCK_K
        if IS_EVEN:
            codes = tl.load(codes_at)
            pairs = tl.load(pairs_at)
        else:
            inside = first + elements < K
            codes = tl.load(codes_at, mask=has_column & inside[None, :], other=0)
            has_span = (first + tl.arange(0, SPANS) * SPAN < K)[None, :]
            pairs = tl.load(pairs_at, mask=has_column & has_span, other=0)
        scales, minimums = unpacked(_of_words(pairs, WORDS))
        even = minimums - scales * EVEN_BIAS
        odd = minimums - scales * ODD_BIAS
        for code in tl.static_range(32 // BITS):
            ks = first + elements + code * BITS  # [WORDS]
            if IS_EVEN:
                x = tl.load(x_rows + ks[:, None])
            else:
                x = tl.load(x_rows + ks[:, None], mask=inside[:, None], other=0.0)
            value = biased_code(codes, EVEN_BITS, ODD_BITS, code, BITS)
            weight = value * scales + (even if code % 2 == 0 else odd)
            acc = tl.dot(weight.to(x.dtype), x, acc=acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["T", "num_parts", "part_blocks"])
def _word_tiles_kernel(
    out_ptr,  # [T, N]; float32 [parts, T, N] when IS_SPLIT
    x_ptr,  # [T, K]
    codes_ptr,  # [N, K * BITS / 32] int32
    pairs_ptr,  # [N, K / SPAN] integers: scales and minimums; [N, 1] if SPAN is 0
    bias_ptr,  # [N]; unused unless HAS_BIAS
    T,
    x_stride_token,
    N,
    K,
    num_words,  # in a row
    num_spans,  # in a row
    num_parts,
    part_blocks,
    IS_EVEN: tl.constexpr,  # blocks cover N, and parts K, exactly
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    EVEN_BITS: tl.constexpr,
    ODD_BITS: tl.constexpr,
    EVEN_BIAS: tl.constexpr,
    ODD_BIAS: tl.constexpr,
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
    codes_rows = codes_ptr + columns[:, None] * num_words
    pairs_rows = pairs_ptr + columns[:, None] * num_spans
    # Rows beyond T are the last one, and not stored.
    x_rows = x_ptr + tl.minimum(tokens, T - 1)[None, :] * x_stride_token  # [1, BLOCK_T]
    at = tokens[None, :] * N + columns[:, None]

    if IS_SPLIT:
        part = tl.program_id(2)
        acc = _sum_of_part(
            codes_rows, pairs_rows, x_rows, has_column,
            part * part_blocks, part_blocks, K,
            IS_EVEN, SPAN, BITS, EVEN_BITS, ODD_BITS, EVEN_BIAS, ODD_BIAS, BLOCK_N, BLOCK_T, BLOCK_K,
        )  # fmt: skip
        tl.store(out_ptr + part.to(tl.int64) * T * N + at, acc, mask=has_column & has_token)
    else:
        total = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
        for part in range(num_parts):
            total += _sum_of_part(
                codes_rows, pairs_rows, x_rows, has_column,
                part * part_blocks, part_blocks, K,
                IS_EVEN, SPAN, BITS, EVEN_BITS, ODD_BITS, EVEN_BIAS, ODD_BIAS, BLOCK_N, BLOCK_T, BLOCK_K,
            )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=has_column & has_token)


def word_tiles_triton(
    x: Tensor, weight: WordWeight, bias: Tensor | None, *, out: Tensor, config: WordTilesConfig | None = None
) -> None:
    """Write `x` `[T, K]` times `weight` `[N, K]` transposed, plus `bias` `[N]`, to `out` `[T, N]`.

    `config` overrides the choice by shape (to test another).
    """
    num_tokens, (out_size, in_size), bits = x.shape[0], weight.shape, weight.num_bits
    if num_tokens == 0:
        return
    config = config or word_tiles_config(out_size=out_size, in_size=in_size, num_tokens=num_tokens, num_bits=bits)
    num_parts = triton.cdiv(in_size, config.part_size)
    num_tiles = triton.cdiv(num_tokens, config.block_t), triton.cdiv(out_size, config.block_n)
    is_split = num_parts > 1 and num_tiles[0] * num_tiles[1] < 2 * PROCESSORS
    target = torch.empty(num_parts, *out.shape, dtype=torch.float32, device=x.device) if is_split else out
    (even_bits, odd_bits), (even_bias, odd_bias) = BIAS_BITS[bits], BIASES[bits]
    _word_tiles_kernel[(*num_tiles, num_parts if is_split else 1)](
        target,
        x,
        weight.codes,
        as_integers(weight.scales),
        weight.scales if bias is None else bias,
        num_tokens,
        x.stride(0),
        out_size,
        in_size,
        weight.codes.shape[1],
        weight.scales.shape[1],
        num_parts,
        config.part_size // config.block_k,
        IS_EVEN=in_size % config.part_size == 0 and out_size % config.block_n == 0,
        SPAN=0 if weight.scales.shape[1] == 1 else weight.span,
        BITS=bits,
        EVEN_BITS=even_bits,
        ODD_BITS=odd_bits,
        EVEN_BIAS=even_bias,
        ODD_BIAS=odd_bias,
        HAS_BIAS=bias is not None and not is_split,
        IS_SPLIT=is_split,
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if is_split:
        add_parts(target, bias, out=out)


@triton.jit(do_not_specialize=["even_bits", "odd_bits"])
def _widen_words_kernel(
    out_ptr,  # [N, K], contiguous
    codes_ptr,  # [N, K * BITS / 32] int32
    pairs_ptr,  # [N, K / SPAN] integers: scales and minimums
    K,
    num_words,  # in a row
    num_spans,  # in a row
    even_bits,
    odd_bits,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    EVEN_BIAS: tl.constexpr,
    ODD_BIAS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """One program per (row, block of words): widen their codes."""
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)  # [BLOCK_WORDS]
    inside = words < num_words
    elements = words // BITS * 32 + words % BITS  # of their first codes
    codes = tl.load(codes_ptr + row * num_words + words, mask=inside, other=0)
    pairs = tl.load(pairs_ptr + row * num_spans + elements // SPAN, mask=inside, other=0)
    scales, minimums = unpacked(pairs)
    for code in tl.static_range(32 // BITS):
        biased = minimums - scales * (EVEN_BIAS if code % 2 == 0 else ODD_BIAS)
        weight = biased_code(codes, even_bits, odd_bits, code, BITS) * scales + biased
        tl.store(out_ptr + row * K + elements + code * BITS, weight.to(out_ptr.dtype.element_ty), mask=inside)


def widen_words_triton(weight: WordWeight, *, out: Tensor) -> None:
    """Write the numbers of `weight` to `out` `[N, K]`, contiguous."""
    num_rows, in_size = weight.shape
    num_words, bits = weight.codes.shape[1], weight.num_bits
    block = min(512, triton.next_power_of_2(num_words))
    even_bias, odd_bias = BIASES[bits]
    _widen_words_kernel[(num_rows, triton.cdiv(num_words, block))](
        out,
        weight.codes,
        as_integers(weight.scales),
        in_size,
        num_words,
        weight.scales.shape[1],
        *BIAS_BITS[bits],
        SPAN=weight.span,
        BITS=bits,
        EVEN_BIAS=even_bias,
        ODD_BIAS=odd_bias,
        BLOCK_WORDS=block,
        num_warps=4,
    )
