"""A matrix that a file holds as codes with scales, in one form for every format: read a few rows at a time.

An element is `scale * (code - zero)`, computed in float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from sluice.kernels.linear.float8 import Float8Weight
from sluice.kernels.linear.grouped import GROUP, GroupedWeight, collected, packed_nibbles
from sluice.kernels.linear.int8 import Int8Weight
from sluice.kernels.linear.stored import PackedWeight
from sluice.kernels.linear.words import FLOAT8_CODES, WordForm

Product: TypeAlias = Literal["spans", "int8", "none"]
"""Which product multiplies a matrix as it is: of groups, of int8 with rows in int8, or none."""

_ROWS_ELEMENTS = 2**16
"""Elements that are a byte each, or in float32, at a time."""

_ROWS_MULTIPLE = 128
"""Rows are read in multiples of this: of the formats' words and blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedRows:
    """Some rows of a matrix."""

    codes: Tensor
    """`[n, K]`: uint8 of 4 bits, int8 or float8 of 8."""

    scales: Tensor
    """`[n, spans]` float32: of runs of as many elements of a row."""

    zeros: Tensor | None = None
    """`[n, spans]` int8: the code that stands for zero; None for 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A matrix `[N, K]` that a file holds as codes."""

    shape: tuple[int, int]
    num_bits: int
    span: int
    """Elements of a row that share a scale; the last run may be shorter."""

    rows: Callable[[slice], CodedRows]
    """Reads rows, from a multiple of 128 on."""

    product: Product
    reason: str = ""
    """Why no product multiplies it, for people: what it is in."""

    is_float8: bool = False
    """Whether a GPU may multiply it in FP8: with rows in FP8, and scales of rows or of 128 elements."""

    order: Tensor | None = None
    """`[K]`: the span of each element of a row, if they are not in order."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in `dtype`, rounded once, a few rows at a time."""
        out = torch.empty(self.shape, dtype=dtype)
        for rows in self._runs():
            out[rows] = self._numbers(self.rows(rows))
        return out

    def packed(self) -> PackedWeight | None:
        """Return the matrix as a product multiplies it; None if none does."""
        match self.product:
            case "spans":
                order = None if self.order is None else self.order.argsort(stable=True)
                parts = (_in_spans(self.rows(rows), self.num_bits, order) for rows in self._runs())
                return collected(parts, self.shape[0])
            case "int8":
                coded = self.rows(slice(0, self.shape[0]))
                return Int8Weight(codes=coded.codes, scales=coded.scales[:, 0].contiguous())
            case "none":
                return None

    def float8(self) -> Float8Weight:
        """Return a matrix that is `is_float8`."""
        coded = self.rows(slice(0, self.shape[0]))
        return Float8Weight(codes=coded.codes, scales=coded.scales.contiguous())

    @property
    def float8_bytes(self) -> int:
        """What it takes in FP8."""
        return self.shape[0] * (self.shape[1] + 4 * -(-self.shape[1] // self.span))

    @property
    def packed_bytes(self) -> int:
        """What it takes packed; 0 if no product multiplies it."""
        if self.product == "none":
            return 0
        elements, num_spans = self.shape[0] * self.shape[1], -(-self.shape[1] // self.span)
        return elements * self.num_bits // 8 + self.shape[0] * num_spans * (5 if self.product == "spans" else 4)

    @property
    def word_form(self) -> WordForm | None:
        """The form in which a GPU's product reads it; None if none does."""
        if self.is_float8:
            return WordForm(8, 0 if self.span == self.shape[1] else self.span, FLOAT8_CODES)
        if self.product == "none":
            return None
        return WordForm.of_spans(self.num_bits, self.span, self.shape[1])

    def _runs(self) -> Iterator[slice]:
        step = max(_ROWS_ELEMENTS // self.shape[1] // _ROWS_MULTIPLE, 1) * _ROWS_MULTIPLE
        for first in range(0, self.shape[0], step):
            yield slice(first, min(first + step, self.shape[0]))

    def _numbers(self, coded: CodedRows) -> Tensor:
        numbers = coded.codes.float()
        if coded.zeros is not None:
            numbers -= self._spread(coded.zeros.float())
        return numbers.mul_(self._spread(coded.scales))

    def _spread(self, of_spans: Tensor) -> Tensor:
        """Return a number for each element, of one for each span."""
        if self.order is not None:
            return of_spans[:, self.order]
        return of_spans.repeat_interleave(self.span, dim=1)[:, : self.shape[1]]


def product_of(span: int, in_size: int, order: Tensor | None = None) -> tuple[Product, str]:
    """Return which product multiplies groups whose scales are of `span` elements of a row, or why none does."""
    if span % GROUP or in_size % span:
        return "none", f"in groups of {span}"
    if order is not None and bool((order.bincount(minlength=in_size // span) != span).any()):
        return "none", "in groups of several sizes"
    return "spans", ""


def _in_spans(coded: CodedRows, num_bits: int, order: Tensor | None) -> GroupedWeight:
    """Pack rows; `order` `[K]`: their elements, those of the first span first, then those of the next."""
    zeros = torch.zeros(coded.scales.shape, dtype=torch.int8) if coded.zeros is None else coded.zeros
    codes = coded.codes if order is None else coded.codes[:, order]
    return GroupedWeight(
        codes=packed_nibbles(codes) if num_bits == 4 else codes.contiguous(),
        scales=coded.scales,
        zeros=zeros,
        order=None if order is None else order.int(),
    )
