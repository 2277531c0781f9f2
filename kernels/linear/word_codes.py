# Triton's language is not typable.
# pyright: basic, reportOperatorIssue=false, reportAssignmentType=false
"""Device functions that read codes, scales and minimums of weights in words, for the products of a GPU.

A code is not converted, which takes a slow unit: its bits are put into the mantissa of a power of two, its bias. A
kernel without the matrix unit takes the bits of the biases as arguments: the compiler joins a mask and a constant in
one instruction only if one of them is not known to it. Known ones let codes be read from shared memory as the matrix
unit takes them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def biased_code(words, even, odd, CODE: tl.constexpr, BITS: tl.constexpr):
    """Return a code of each word as a float32, plus the power of two of even or odd codes."""
    PLACE: tl.constexpr = 8 if BITS == 8 else (16 if CODE % 2 == 0 else 12)
    SHIFT: tl.constexpr = PLACE - CODE * BITS
    if SHIFT > 0:
        shifted = words << SHIFT
    elif SHIFT < 0:
        shifted = words >> -SHIFT
    else:
        shifted = words
    bits = (shifted & ((2**BITS - 1) << PLACE)) | (even if CODE % 2 == 0 else odd)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def unpacked(pairs):
    """Return scales and minimums, in float32, of pairs in integers of 32 or 64 bits."""
    if pairs.dtype.primitive_bitwidth == 32:
        scales = pairs.to(tl.int16).to(tl.float16, bitcast=True)
        minimums = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        scales = pairs.to(tl.int32).to(tl.float32, bitcast=True)
        minimums = (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return scales.to(tl.float32), minimums.to(tl.float32)


def as_integers(scales: Tensor) -> Tensor:
    """Return pairs `[N, spans, 2]` as integers `[N, spans]`, which a kernel loads at once."""
    return scales.view(torch.int32 if scales.dtype == torch.float16 else torch.int64)[:, :, 0]
