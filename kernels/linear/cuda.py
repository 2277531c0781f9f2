"""Matrix products on a GPU: the library's (cuBLAS), or over weights in int8."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import Protocol

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check
from sluice.kernels.gated_activation import Activation
from sluice.kernels.linear.int8 import dequantized, quantized
from sluice.kernels.linear.plain import GatedLinear, Linear, PlainLinear

MAX_KERNEL_ROWS = 256
"""Rows above which a product is compute-bound, so that widening the weight for the library pays.
Calculated, not measured: widening writes and reads 4 more bytes per weight, about 1 ps at 4 TB/s, and at 256 rows a
product at half the library's rate of 700 TFLOP/s loses 0.7 ps per weight to it.
"""

_WIDENED_ROWS = 16_384
"""Rows of a weight that are widened at once: they need additional memory."""


class Int8Linear:
    """A product over a weight in int8: read directly for few rows, widened in pieces for the library for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Round `weight` `[N, K]` to int8."""
        self._weight, self._scales = quantized(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, N]`."""
        out = x.new_empty(x.shape[0], self._weight.shape[0])
        if path_of("linear", x) is Path.TORCH:
            self._multiply_widened(x, out, _widen_torch)
        elif x.shape[0] <= MAX_KERNEL_ROWS:
            from sluice.kernels.linear.kernel import int8_product_triton

            int8_product_triton(x, self._weight, self._scales, self._bias, out=out)
        else:
            from sluice.kernels.linear.kernel import widen_triton

            self._multiply_widened(x, out, widen_triton)
        return out

    def _multiply_widened(self, x: Tensor, out: Tensor, widen: "Widen") -> None:
        for first in range(0, out.shape[1], _WIDENED_ROWS):
            rows = slice(first, first + _WIDENED_ROWS)
            weight = x.new_empty(self._weight[rows].shape)
            widen(self._weight[rows], self._scales[rows], out=weight)
            torch.mm(x, weight.T, out=out[:, rows])
        if self._bias is not None:
            out += self._bias


class Widen(Protocol):
    """A function that writes the weight which int8 and scales represent."""

    def __call__(self, weight: Tensor, scales: Tensor, *, out: Tensor) -> None:
        """Write to `out`."""
        ...


def _widen_torch(weight: Tensor, scales: Tensor, *, out: Tensor) -> None:
    """Widen with torch's operators."""
    out.copy_(dequantized(weight, scales, out.dtype))


def pack_linear_cuda(weight: Tensor, bias: Tensor | None, *, is_int8: bool) -> Linear:
    """Prepare one product.

    In the weight's own dtype the library is used: at prefill shapes no kernel here comes near it; whether it reads
    weights at the memory's rate at decode shapes is measured by `benchmarks gpu --sections roof`. In int8 a kernel here
    is used: the library has no product of floats and int8.

    Raises:
        ValueError: int8 is not supported for it.
    """
    if not is_int8:
        return PlainLinear(weight, bias)
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    check(is_half, "int8 needs a model in float16 or bfloat16, got {}", weight.dtype)
    return Int8Linear(weight, bias)


def pack_gated_linear_cuda(weight: Tensor, bias: Tensor | None, *, activation: Activation, is_int8: bool) -> Linear:
    """Prepare a gated product: as `pack_linear_cuda`, the first half of columns gating the second."""
    return GatedLinear(pack_linear_cuda(weight, bias, is_int8=is_int8), activation)
