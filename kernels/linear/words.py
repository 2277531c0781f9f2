"""Weights of 4 or 8 bits as the products of a GPU read them: codes in words of 32 bits, in one form for all.

A group of 32 elements of K is 4 words of 4 bits, or 8 words of 8. Word q of the W words of a group has its elements q,
q + W, q + 2 * W and so on, the first in the lowest bits. So four words next to each other, what a thread loads at once,
need one scale, and the elements of one place in them are neighbours in a row of x.

An element is `scale * code + minimum`, codes without a sign: 0 to 15, or 0 to 255.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.kernels.linear.grouped import GROUP, UNIT_GROUPS, GroupedWeight, whole_codes
from sluice.kernels.linear.int8 import Int8Weight

BIASES = {4: (2**7, 2**11), 8: (2**15, 2**15)}
"""By bits of a code: the powers of two that a product adds to even and odd codes of a word to have floats
(`word_codes`): such that most shifts serve two codes, and a float32 has bits enough for sums beside them.
"""

BIAS_BITS = {4: (134 << 23, 138 << 23), 8: (142 << 23, 142 << 23)}
"""Their bits as float32."""

_LARGEST_SPAN = 128
"""A span of more elements, other than a row, is several: a step of a product along K then has whole spans."""

_ROWS_ELEMENTS = 2**24
"""Elements that are a byte each, or in float32, at a time."""


FLOAT8_CODES = "float8_e4m3fn"
"""Of a form that has no words, but codes in FP8 and scales in float32."""


class WordForm(NamedTuple):
    """What products of packed weights depend on, other than sizes."""

    num_bits: int
    span: int
    """Elements that share a scale; 0: a row."""

    scales: str
    """Name of the dtype of scales and minimums, or `FLOAT8_CODES`."""

    @classmethod
    def of_groups(cls, num_bits: int) -> "WordForm":
        """Return the form of groups with a scale each."""
        return cls(num_bits, GROUP, "float16")

    @classmethod
    def of_spans(cls, num_bits: int, span: int, in_size: int) -> "WordForm":
        """Return the form of rows of which `span` elements share a scale."""
        return cls(num_bits, 0 if span == in_size else gcd(span, _LARGEST_SPAN), "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class WordWeight:
    """A matrix `[N, K]` of 4 or 8 bits."""

    codes: Tensor
    """`[N, K * bits / 32]` int32."""

    scales: Tensor
    """`[N, spans, 2]`, float16 or float32: scale and minimum of each 32, 64 or 128 elements, or of a row."""

    num_bits: int

    @property
    def shape(self) -> torch.Size:
        """N and K."""
        return torch.Size((self.codes.shape[0], self.codes.shape[1] * 32 // self.num_bits))

    @property
    def span(self) -> int:
        """Elements that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return sum(part.numel() * part.element_size() for part in (self.codes, self.scales))

    def map(self, change: Callable[[Tensor], Tensor]) -> "WordWeight":
        """Return the weight of which `change` has selected rows: it is called for each tensor."""
        return WordWeight(codes=change(self.codes), scales=change(self.scales), num_bits=self.num_bits)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in `dtype`: computed in float32 and rounded once, some rows at a time."""
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        step = max(1, _ROWS_ELEMENTS // self.shape[1])
        for first in range(0, self.shape[0], step):
            rows = slice(first, first + step)
            out[rows] = _numbers(self.map(lambda part, rows=rows: part[rows]))
        return out


def _numbers(weight: WordWeight) -> Tensor:
    """Return the matrix in float32."""
    places = torch.arange(0, 32, weight.num_bits, dtype=torch.int32, device=weight.codes.device)
    of_groups = weight.codes.unflatten(1, (-1, 1, weight.num_bits))  # [N, groups, 1, words]
    codes = (of_groups >> places[:, None]) & (2**weight.num_bits - 1)  # [N, groups, codes of a word, words]
    scales, minimums = weight.scales.float()[:, :, None].unbind(3)  # [N, spans, 1]
    return (codes.flatten(1).unflatten(1, (scales.shape[1], -1)) * scales + minimums).flatten(1)


def random_words(form: WordForm, out_size: int, in_size: int, device: torch.device) -> WordWeight:
    """Return a random matrix, of numbers as large as those of a model, from torch's generator of the device."""
    num_words, centre = in_size * form.num_bits // 32, 2 ** (form.num_bits - 1)
    codes = torch.randint(-(2**31), 2**31, (out_size, num_words), dtype=torch.int32, device=device)
    scales = torch.rand(out_size, in_size // (form.span or in_size), device=device) / centre * in_size**-0.5
    scales = scales.to(getattr(torch, form.scales))
    return WordWeight(codes=codes, scales=_pairs(scales, -centre * scales), num_bits=form.num_bits)


def in_words(weight: GroupedWeight | Int8Weight) -> WordWeight:
    """Return the same matrix in words, on its device, its elements in the order in which they are stored.

    Scales and minimums that count units are multiplied with them and rounded to float16, by at most 2**-12 of each; all
    else is exact.
    """
    if isinstance(weight, Int8Weight):
        scales = weight.scales[:, None]
        return WordWeight(codes=_words(weight.codes), scales=_pairs(scales, -128 * scales), num_bits=8)
    codes = [_words(whole_codes(rows)) for rows in _some_rows(weight)]
    return WordWeight(
        codes=codes[0] if len(codes) == 1 else torch.cat(codes), scales=_scales_of(weight), num_bits=weight.num_bits
    )


def _some_rows(weight: GroupedWeight) -> Iterator[GroupedWeight]:
    step = max(1, _ROWS_ELEMENTS // weight.shape[1])
    for first in range(0, weight.shape[0], step):
        yield weight.map(lambda part, first=first: part[first : first + step])


def _words(codes: Tensor) -> Tensor:
    """Pack codes `[N, K]`, uint8 of 4 bits or int8 of 8."""
    if codes.dtype == torch.int8:
        of_words = (codes.view(torch.uint8) ^ 128).unflatten(1, (-1, 4, 8)).transpose(2, 3)
    else:
        low, high = codes.unflatten(1, (-1, 4, 2, 4)).transpose(2, 4).unbind(3)
        of_words = low | (high << 4)
    # Each is [N, groups, words, bytes].
    return of_words.contiguous().view(torch.int32).flatten(1)


def _scales_of(weight: GroupedWeight) -> Tensor:
    """Return pairs of scales and minimums: in float16 as they are stored, or of spans in float32."""
    if weight.zeros is not None:
        elements = weight.span * GROUP
        span = WordForm.of_spans(weight.num_bits, elements, weight.shape[1]).span
        repeats = elements // span if span else 1
        scales, zeros = (part.repeat_interleave(repeats, dim=1) for part in (weight.scales, weight.zeros))
        # Of 8 bits codes have a sign.
        return _pairs(scales, -scales * (zeros.float() + (128 if weight.num_bits == 8 else 0)))
    if weight.minimums is None:
        return _pairs(weight.scales, -128 * weight.scales)
    if weight.units is None:
        return _pairs(weight.scales, weight.minimums)
    units = weight.units.float().unflatten(1, (-1, 2)).repeat_interleave(UNIT_GROUPS, dim=1)  # [N, K / 32, 2]
    return (torch.stack((weight.scales, weight.minimums), dim=2).float() * units).half()


def _pairs(scales: Tensor, minimums: Tensor) -> Tensor:
    return torch.stack((scales, minimums), dim=2)
