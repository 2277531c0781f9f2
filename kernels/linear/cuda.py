"""Matrix products on a card: the library's (cuBLAS), or over weights in int8."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch
from torch import Tensor

from kernels.checks import check
from kernels.gated_activation import Activation
from kernels.linear.int8 import quantized
from kernels.linear.plain import GatedLinear, Linear, PlainLinear

MAX_KERNEL_ROWS = 256
"""With more rows a product is bound by its arithmetic, at which the library is so much the better that widening the
weight for it pays. Counted, not measured: widening writes and reads 4 bytes a weight more, about 1 ps at 4 TB/s, and at
256 rows a product at half the library's rate of 700 TFLOP/s loses 0.7 ps a weight to it."""

_WIDENED_ROWS = 16_384
"""Rows of a weight that are widened at once: they need memory beside the weight."""


class Int8Linear:
    """A product over a weight in int8: read as it lies for few rows, widened in pieces for the library for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Round `weight` `[N, K]` to int8."""
        self._weight, self._scales = quantized(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[T, K]` to `[T, N]`."""
        out = x.new_empty(x.shape[0], self._weight.shape[0])
        if x.shape[0] <= MAX_KERNEL_ROWS:
            from kernels.linear.kernel import int8_product_triton

            int8_product_triton(x, self._weight, self._scales, self._bias, out=out)
        else:
            self._multiply_widened(x, out)
        return out

    def _multiply_widened(self, x: Tensor, out: Tensor) -> None:
        from kernels.linear.kernel import widen_triton

        for first in range(0, out.shape[1], _WIDENED_ROWS):
            rows = slice(first, first + _WIDENED_ROWS)
            weight = x.new_empty(self._weight[rows].shape)
            widen_triton(self._weight[rows], self._scales[rows], out=weight)
            torch.mm(x, weight.T, out=out[:, rows])
        if self._bias is not None:
            out += self._bias


def pack_linear_cuda(weight: Tensor, bias: Tensor | None, *, is_int8: bool) -> Linear:
    """Prepare one product.

    In its own dtype it is the library's: at the shapes of prefills nothing of ours comes near it, and whether at those
    of decodes it reads weights at the memory's rate is what `benchmarks.gpu --sections roof` asks. In int8 it is ours:
    the library has no product of floats and int8.

    Raises:
        ValueError: int8 cannot be had.
    """
    if not is_int8:
        return PlainLinear(weight, bias)
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    check(is_half, "int8 needs a model in float16 or bfloat16, got {}", weight.dtype)
    return Int8Linear(weight, bias)


def pack_gated_linear_cuda(weight: Tensor, bias: Tensor | None, *, activation: Activation, is_int8: bool) -> Linear:
    """As `pack_linear_cuda`, the first half of columns gating the second."""
    return GatedLinear(pack_linear_cuda(weight, bias, is_int8=is_int8), activation)
