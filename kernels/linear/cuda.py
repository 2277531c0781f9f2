"""Matrix products on a GPU: the library's (cuBLAS), except for very few rows; or over weights in int8, or packed.

Those of a deterministic process are kernels that compute a row in the same way for any number of rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check
from sluice.kernels.gated_activation import Activation
from sluice.kernels.linear.float8 import Float8Weight
from sluice.kernels.linear.grouped import GroupedWeight
from sluice.kernels.linear.int8 import MAX_IN_SIZE, dequantized, quantized
from sluice.kernels.linear.plain import GatedLinear, Linear, PlainLinear
from sluice.kernels.linear.stored import CodedWeight, StoredWeight
from sluice.kernels.linear.words import WordWeight, in_words

MAX_KERNEL_ROWS = 256
"""Rows above which widening the weight for the library takes less time than the product in integers, on an H200."""

_FEW_ROWS = ((4, 2**22 - 1), (2, 2**24))
"""Rows, and the number of weights up to which `few_rows` is the fastest for them; for one row it always is.
Measured on an H200, compared with cuBLAS in 16 bits and with the product in integers: for more rows, the arithmetic of
large weights takes longer than their bytes.
"""

MAX_PACKED_ROWS = 512
"""Rows above which widening a packed weight for the library takes less time than its tiles: predicted for an H200."""

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


class PackedLinear:
    """A product over a weight of 4 or 8 bits: read directly, or for many rows widened in pieces for the library.

    In a deterministic process it is always the tiles' kernel, which sums K in one order for any number of rows.
    """

    def __init__(self, weight: WordWeight, bias: Tensor | None, order: Tensor | None = None) -> None:
        """Take `weight` `[N, K]` as it is; its element k is multiplied with element `order[k]` of a row."""
        self._order = None if order is None else order.to(weight.codes.device)
        self._weight = weight
        self._bias = bias
        self._has_row_kernel = has_row_kernel(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, N]`."""
        x = x if self._order is None else x.index_select(1, self._order)
        out = x.new_empty(x.shape[0], self._weight.shape[0])
        path = path_of("linear", x)
        if path is Path.TORCH:
            _multiply_widened(x, self._bias, out, partial(_dequantize_rows, self._weight))
        elif path is Path.INVARIANT or x.shape[0] <= MAX_PACKED_ROWS:
            self._multiply_directly(x, out, is_row=path is not Path.INVARIANT and len(x) == 1 and self._has_row_kernel)
        else:
            _multiply_widened(x, self._bias, out, partial(_widen_rows, self._weight))
        return out

    def _multiply_directly(self, x: Tensor, out: Tensor, *, is_row: bool) -> None:
        from sluice.kernels.linear.word_row import word_row_triton
        from sluice.kernels.linear.word_tiles import word_tiles_triton

        multiply = word_row_triton if is_row else word_tiles_triton
        multiply(x, self._weight, self._bias, out=out)


class Float8Linear:
    """A product over a weight in FP8: of one row in 16 bits, of more with rows rounded to FP8.

    In a deterministic process one row is rounded, too. It is never widened for the library: the matrix unit takes twice
    as many numbers in FP8 as in 16 bits.
    """

    def __init__(self, weight: Float8Weight, bias: Tensor | None) -> None:
        """Take `weight` `[N, K]` as it is."""
        self.weight = weight
        self.bias = bias
        self._has_row_kernel = has_row_kernel(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, N]`."""
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        if path_of("linear", x) is Path.TORCH:
            _multiply_widened(x, self.bias, out, partial(_dequantize_rows, self.weight))
            return out
        from sluice.kernels.linear.float8_row import float8_row_triton
        from sluice.kernels.linear.float8_tiles import float8_tiles_triton

        multiply = float8_tiles_triton if self.rounds(x) else float8_row_triton
        multiply(x, self.weight, self.bias, out=out)
        return out

    def rounds(self, x: Tensor) -> bool:
        """Return whether rows are rounded to FP8 for their product."""
        path = path_of("linear", x)
        if path is Path.TORCH:
            return False
        return path is Path.INVARIANT or len(x) != 1 or not self._has_row_kernel


def _multiply_widened(x: Tensor, bias: Tensor | None, out: Tensor, write: Callable[[slice, Tensor], object]) -> None:
    """Multiply with the library, some rows of the weight after others, which `write` makes numbers of."""
    for first in range(0, out.shape[1], _WIDENED_ROWS):
        rows = slice(first, first + _WIDENED_ROWS)
        wide = x.new_empty(out[:, rows].shape[1], x.shape[1])
        write(rows, wide)
        torch.mm(x, wide.T, out=out[:, rows])
    if bias is not None:
        out += bias


def _dequantize_rows(weight: WordWeight | Float8Weight, rows: slice, wide: Tensor) -> None:
    """Write numbers of rows with torch's operators."""
    wide.copy_(weight.map(lambda part: part[rows]).dequantized(wide.dtype))


def _widen_rows(weight: WordWeight, rows: slice, wide: Tensor) -> None:
    """Write numbers of rows with the kernel."""
    from sluice.kernels.linear.word_tiles import widen_words_triton

    widen_words_triton(weight.map(lambda part: part[rows]), out=wide)


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


def has_row_kernel(weight: WordWeight | Float8Weight) -> bool:
    """Return whether one row is multiplied without tiles; interpreted, that is the slowest."""
    return weight.codes.is_cuda


def pack_linear_cuda(weight: StoredWeight, bias: Tensor | None, *, is_int8: bool) -> Linear:
    """Prepare one product.

    Raises:
        ValueError: int8 is not supported for it.
    """
    if not isinstance(weight, Tensor):
        return _pack_coded(weight, bias)
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    if not is_int8 and path_of("linear", weight) is Path.INVARIANT:
        return InvariantLinear(weight, bias)
    if not is_int8:
        return HalfLinear(weight, bias) if is_half and weight.is_contiguous() else PlainLinear(weight, bias)
    check(is_half, "int8 needs a model in float16 or bfloat16, got {}", weight.dtype)
    check(weight.shape[1] <= MAX_IN_SIZE, "int8 needs rows of at most {}, got {}", MAX_IN_SIZE, weight.shape[1])
    return Int8Linear(weight, bias)


def _pack_coded(weight: CodedWeight, bias: Tensor | None) -> Linear:
    if isinstance(weight, Float8Weight):
        return Float8Linear(weight, bias)
    return PackedLinear(in_words(weight), bias, weight.order if isinstance(weight, GroupedWeight) else None)


def pack_gated_linear_cuda(
    weight: StoredWeight, bias: Tensor | None, *, activation: Activation, is_int8: bool
) -> Linear:
    """Prepare a gated product: as `pack_linear_cuda`, the first half of columns gating the second."""
    product = pack_linear_cuda(weight, bias, is_int8=is_int8)
    if isinstance(product, InvariantLinear):
        return InvariantGatedLinear(product, activation)
    return GatedLinear(product, activation)
