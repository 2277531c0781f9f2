"""Weights of 4 or 8 bits in groups of 32 elements of K, and the definition of their product.

Of 4 bits an element is `scale * code + minimum`, codes 0 to 15; of 8 bits it is `scale * code`, codes -128 to 127. Each
group has a scale, and of 4 bits a minimum, in float16, or in 8 bits that count units of 8 groups. Or several groups, a
span, share a scale in float32, and the code that stands for zero: an element is `scale * (code - zero)`. The native
product rounds rows of x to 8 bits in groups of 32, too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.kernels.checks import check

GROUP = 32
UNIT_GROUPS = 8
_ROWS_ELEMENTS = 2**15
"""Elements that are in float32 at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """A matrix `[N, K]`, kept packed."""

    codes: Tensor
    """8 bits: `[N, K]` int8. 4 bits: `[N, K / 2]` uint8, four bytes for eight elements: the first four are their low
    halves, the others the high halves.
    """

    scales: Tensor
    """`[N, K / 32]` float16, or uint8 with units, or `[N, spans]` float32 with zeros."""

    minimums: Tensor | None = None
    """Like `scales`, of 4 bits; None of 8, and with zeros."""

    units: Tensor | None = None
    """`[N, 2 * K / 256]` float16: for each 8 groups what a scale of one and a minimum of one stand for."""

    zeros: Tensor | None = None
    """`[N, spans]` int8, if groups share scales: each span is K / 32 / spans groups."""

    order: Tensor | None = None
    """`[K]` int32, contiguous: element k of each row here is element `order[k]` of the matrix; None: they have its
    order. Only with zeros.
    """

    @property
    def shape(self) -> torch.Size:
        """N and K."""
        return torch.Size((self.codes.shape[0], self.codes.shape[1] * 8 // self.num_bits))

    @property
    def num_bits(self) -> int:
        """Bits of a code."""
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def span(self) -> int:
        """Groups that share a scale."""
        return self.shape[1] // GROUP // self.scales.shape[1]

    @property
    def form(self) -> tuple[object, ...]:
        """What weights whose rows are stacked must have in common."""
        return (*self.parts, self.num_bits, self.span, None if self.order is None else tuple(self.order.tolist()))

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that there are, by the names of their fields, each with a row for each of the matrix."""
        named = {name: getattr(self, name) for name in ("codes", "scales", "minimums", "units", "zeros")}
        return {name: part for name, part in named.items() if part is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> "GroupedWeight":
        """Return the weight of which `change` has selected rows: it is called for each tensor."""
        return GroupedWeight(**{name: change(part) for name, part in self.parts.items()}, order=self.order)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in `dtype`: computed in float32 and rounded once, a few rows at a time."""
        out = torch.empty(self.shape, dtype=dtype)
        places = None if self.order is None else self.order.argsort()
        for rows in _runs_of_rows(self.shape):
            numbers = _numbers(self.map(lambda part, rows=rows: part[rows])).flatten(1)
            out[rows] = numbers if places is None else numbers[:, places]
        return out


def _runs_of_rows(shape: torch.Size) -> list[slice]:
    step = max(1, _ROWS_ELEMENTS // max(1, shape[1]))
    return [slice(first, first + step) for first in range(0, shape[0], step)]


def _numbers(weight: GroupedWeight) -> Tensor:
    """Return the matrix in float32, `[N, K / 32, 32]`, in the order of the weight."""
    if weight.zeros is not None:
        codes = whole_codes(weight).unflatten(1, (weight.zeros.shape[1], -1)).float()
        numbers = (codes - weight.zeros.float()[:, :, None]) * weight.scales[:, :, None]
        return numbers.flatten(1).unflatten(1, (-1, GROUP))
    codes = whole_codes(weight).unflatten(1, (-1, GROUP)).float()
    scales, minimums = weight.scales.float(), None if weight.minimums is None else weight.minimums.float()
    if weight.units is not None and minimums is not None:
        units = weight.units.float().unflatten(1, (-1, 2)).repeat_interleave(UNIT_GROUPS, dim=1)  # [N, K / 32, 2]
        scales, minimums = scales * units[:, :, 0], minimums * units[:, :, 1]
    scaled = scales[:, :, None] * codes
    return scaled if minimums is None else scaled + minimums[:, :, None]


def whole_codes(weight: GroupedWeight) -> Tensor:
    """Return the codes `[N, K]`, a byte each."""
    if weight.num_bits == 8:
        return weight.codes
    fours = weight.codes.unflatten(1, (-1, 1, 4))
    return torch.cat([fours & 15, fours >> 4], dim=2).flatten(1)


def packed_nibbles(codes: Tensor) -> Tensor:
    """Pack codes below 16, `[N, K]` uint8, as `GroupedWeight.codes` has them."""
    low, high = codes.unflatten(1, (-1, 2, 4)).unbind(2)
    return (low | (high << 4)).flatten(1)


def grouped(weight: Tensor, *, num_bits: int) -> GroupedWeight:
    """Round a matrix `[N, K]` to 4 or 8 bits, a few rows at a time.

    Raises:
        ValueError: K is no multiple of 32.
    """
    check(weight.shape[1] % GROUP == 0, "groups need rows of a multiple of 32, got {}", weight.shape[1])
    runs = _runs_of_rows(weight.shape)
    parts = (_rounded(weight[rows].float().unflatten(1, (-1, GROUP)), num_bits) for rows in runs)
    return collected(parts, weight.shape[0])


def _rounded(numbers: Tensor, num_bits: int) -> GroupedWeight:
    if num_bits == 8:
        scales = (numbers.abs().amax(dim=2) / 127).half()
        codes = _codes(numbers, scales).clamp_(-127, 127).to(torch.int8)
        return GroupedWeight(codes=codes.flatten(1), scales=scales)
    minimums = numbers.amin(dim=2).half()
    scales = ((numbers.amax(dim=2) - minimums.float()) / 15).half()
    codes = _codes(numbers - minimums.float()[:, :, None], scales).clamp_(0, 15).to(torch.uint8)
    return GroupedWeight(codes=packed_nibbles(codes.flatten(1)), scales=scales, minimums=minimums)


def _codes(numbers: Tensor, scales: Tensor) -> Tensor:
    wide = scales.float()[:, :, None]
    return torch.where(wide > 0, numbers / wide, 0.0).round_()


def stacked(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Stack rows. If some have another form or order than others, all are rounded to 8 bits."""
    if len({weight.form for weight in weights}) > 1:
        weights = [_widened(weight) for weight in weights]
    return stacked_rows(weights)


def _widened(weight: GroupedWeight) -> GroupedWeight:
    is_such = weight.num_bits == 8 and weight.zeros is None
    return weight if is_such else grouped(weight.dequantized(torch.float32), num_bits=8)


def stacked_rows(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Stack rows of weights with the same parts, in one order."""
    if len(weights) == 1:
        return weights[0]
    first = weights[0]
    together = {name: torch.cat([weight.parts[name] for weight in weights]) for name in first.parts}
    return GroupedWeight(**together, order=first.order)


def collected(weights: Iterable[GroupedWeight], num_rows: int) -> GroupedWeight:
    """Stack rows of weights with the same parts as they are made, `num_rows` in all: one is in memory at a time."""
    places: dict[str, Tensor] = {}
    first, order = 0, None
    for weight in weights:
        order = weight.order
        rows = slice(first, first + weight.shape[0])
        for name, part in weight.parts.items():
            if name not in places:
                places[name] = torch.empty(num_rows, part.shape[1], dtype=part.dtype)
            places[name][rows] = part
        first = rows.stop
    return GroupedWeight(**places, order=order)


def rounded_rows(x: Tensor) -> Tensor:
    """Return rows of x `[T, K]` as the product reads them, in float64: rounded to 8 bits in groups."""
    groups = x.double().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(dim=2, keepdim=True).float()
    # `127 / largest` would multiply by a rounded reciprocal.
    factors = torch.where((largest > 0) & largest.isfinite(), torch.full_like(largest, 127) / largest, 0.0)
    codes = torch.where(factors > 0, groups * factors.double(), 0.0).round()
    return (codes * (largest / 127).double()).flatten(1)


def grouped_linear_reference(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply `x` `[T, K]`, rounded, by `weight` transposed, in float64, plus `bias` `[N]`: rounded once."""
    x_in_order = x if weight.order is None else x[:, weight.order.long()]
    product = rounded_rows(x_in_order) @ _numbers(weight).flatten(1).double().T
    return (product if bias is None else product + bias.double()).to(x.dtype)
