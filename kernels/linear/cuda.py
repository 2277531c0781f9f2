"""Matrix products on a GPU: the library's (cuBLAS), except for very few rows; or over weights in int8.

Those of a deterministic process are kernels that compute a row in the same way for any number of rows.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check
from sluice.kernels.gated_activation import Activation
from sluice.kernels.linear.int8 import MAX_IN_SIZE, dequantized, quantized
from sluice.kernels.linear.plain import GatedLinear, Linear, PlainLinear

MAX_KERNEL_ROWS = 256
"""Rows above which widening the weight for the library takes less time than the product in integers, on an H200."""

_FEW_ROWS = ((4, 2**22 - 1), (2, 2**24))
"""Rows, and the number of weights up to which `few_rows` is the fastest for them; for one row it always is.
Measured on an H200, compared with cuBLAS in 16 bits and with the product in integers: for more rows, the arithmetic of
large weights takes longer than their bytes.
"""

_WIDENED_ROWS = 16_384
"""Rows of a weight that are widened at once: they need additional memory."""


class HalfLinear:
    """A product over a weight in 16 bits: the library's, or for very few rows a kernel here that reads it faster."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take `weight` `[N, K]`, contiguous, as it is."""
        self._weight = weight
        self._bias = bias
        self._max_few_rows = max_few_rows(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, N]`."""
        if not 0 < x.shape[0] <= self._max_few_rows or path_of("linear", x) is Path.TORCH:
            return F.linear(x, self._weight, self._bias)
        from sluice.kernels.linear.few_rows import few_rows_triton

        out = x.new_empty(x.shape[0], self._weight.shape[0])
        few_rows_triton(x, self._weight, None, self._bias, out=out)
        return out


class InvariantLinear:
    """A product over a weight in its dtype whose rows are bitwise identical for any batch composition."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take `weight` `[N, K]`, as it is if it is contiguous."""
        from sluice.kernels.linear.invariant import arrivals

        self._weight = weight.contiguous()
        self._bias = bias
        self._arrived = arrivals(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, N]`."""
        return self._multiplied(x, None)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, N / 2]`, the first half of columns gating the second; the bits of two steps."""
        return self._multiplied(x, activation)

    def _multiplied(self, x: Tensor, activation: Activation | None) -> Tensor:
        from sluice.kernels.linear.invariant import invariant_product

        out = x.new_empty(x.shape[0], self._weight.shape[0] // (1 if activation is None else 2))
        invariant_product(x, self._weight, self._bias, arrived=self._arrived, out=out, activation=activation)
        return out


class InvariantGatedLinear(GatedLinear):
    """A gated product in one launch."""

    def __init__(self, product: InvariantLinear, activation: Activation) -> None:
        super().__init__(product, activation)
        self._gated = product.gated

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, I]`."""
        return self._gated(x, self.activation)


class Int8Linear:
    """A product over a weight in int8: read directly for few rows, widened in pieces for the library for many.

    In a deterministic process it is always read directly, by the kernel whose sums are exact.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Round `weight` `[N, K]` to int8."""
        self._weight, self._scales = quantized(weight)
        self._bias = bias
        self._max_few_rows = max_few_rows(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, N]`."""
        out = x.new_empty(x.shape[0], self._weight.shape[0])
        path = path_of("linear", x)
        if path is Path.TORCH:
            self._multiply_widened(x, out, _widen_torch)
        elif path is Path.INVARIANT:
            from sluice.kernels.linear.kernel import int8_product_triton

            int8_product_triton(x, self._weight, self._scales, self._bias, out=out)
        elif x.shape[0] <= MAX_KERNEL_ROWS:
            self._multiply_directly(x, out)
        else:
            from sluice.kernels.linear.kernel import widen_triton

            self._multiply_widened(x, out, widen_triton)
        return out

    def _multiply_directly(self, x: Tensor, out: Tensor) -> None:
        from sluice.kernels.linear.few_rows import few_rows_triton
        from sluice.kernels.linear.kernel import int8_product_triton

        is_few = 0 < x.shape[0] <= self._max_few_rows
        multiply = few_rows_triton if is_few else int8_product_triton
        multiply(x, self._weight, self._scales, self._bias, out=out)

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


def max_few_rows(weight: Tensor) -> int:
    """Return the number of rows up to which `few_rows` is the fastest for a weight; interpreted, it is the slowest."""
    if not weight.is_cuda:
        return 0
    return next((rows for rows, most in _FEW_ROWS if weight.numel() <= most), 1)


def pack_linear_cuda(weight: Tensor, bias: Tensor | None, *, is_int8: bool) -> Linear:
    """Prepare one product.

    Raises:
        ValueError: int8 is not supported for it.
    """
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    if not is_int8 and path_of("linear", weight) is Path.INVARIANT:
        return InvariantLinear(weight, bias)
    if not is_int8:
        return HalfLinear(weight, bias) if is_half and weight.is_contiguous() else PlainLinear(weight, bias)
    check(is_half, "int8 needs a model in float16 or bfloat16, got {}", weight.dtype)
    check(weight.shape[1] <= MAX_IN_SIZE, "int8 needs rows of at most {}, got {}", MAX_IN_SIZE, weight.shape[1])
    return Int8Linear(weight, bias)


def pack_gated_linear_cuda(weight: Tensor, bias: Tensor | None, *, activation: Activation, is_int8: bool) -> Linear:
    """Prepare a gated product: as `pack_linear_cuda`, the first half of columns gating the second."""
    product = pack_linear_cuda(weight, bias, is_int8=is_int8)
    if isinstance(product, InvariantLinear):
        return InvariantGatedLinear(product, activation)
    return GatedLinear(product, activation)
