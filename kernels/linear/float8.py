"""Weights in FP8 (e4m3), and the rounding of rows that their product reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
SPAN = 128
"""Elements of a row that share a scale, unless all do: those of the blocks in which models are published."""

_LARGEST = 448.0
_ROWS_ELEMENTS = 2**24
"""Elements that are in float32 at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Weight:
    """A matrix `[N, K]` in FP8, whose product rounds rows to FP8, too."""

    codes: Tensor
    """`[N, K]` float8_e4m3fn."""

    scales: Tensor
    """`[N, K / 128]`, rounded up, or `[N, 1]` float32."""

    @property
    def shape(self) -> torch.Size:
        """N and K."""
        return self.codes.shape

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return self.codes.nbytes + self.scales.nbytes

    def map(self, change: Callable[[Tensor], Tensor]) -> "Float8Weight":
        """Return the weight of which `change` has selected rows: it is called for each tensor."""
        # Few of torch's operators take FP8.
        return Float8Weight(codes=change(self.codes.view(torch.uint8)).view(FLOAT8), scales=change(self.scales))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in `dtype`: computed in float32 and rounded once, some rows at a time."""
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        step = max(1, _ROWS_ELEMENTS // self.shape[1])
        for first in range(0, self.shape[0], step):
            rows = slice(first, first + step)
            out[rows] = self.codes[rows].float() * spread(self.scales[rows], self.shape[1])
        return out


def spread(scales: Tensor, in_size: int) -> Tensor:
    """Return a scale for each element, `[N, K]`, of those of spans `[N, spans]`."""
    if scales.shape[1] == 1:
        return scales.expand(-1, in_size)
    return scales.repeat_interleave(SPAN, dim=1)[:, :in_size]


def stacked_float8(weights: Sequence[Float8Weight]) -> Float8Weight:
    """Stack rows. If some have a scale for each row and others for each span, all have the latter."""
    num_spans = max(weight.scales.shape[1] for weight in weights)
    return Float8Weight(
        codes=torch.cat([weight.codes.view(torch.uint8) for weight in weights]).view(FLOAT8),
        scales=torch.cat([weight.scales.expand(-1, num_spans) for weight in weights]),
    )


def random_float8(span: int, out_size: int, in_size: int, device: torch.device) -> Float8Weight:
    """Return a random matrix, of numbers as large as those of a model, from torch's generator of the device."""
    num_spans = -(-in_size // span) if span else 1
    codes = torch.randn(out_size, in_size, device=device).mul_(_LARGEST / 4).clamp_(-_LARGEST, _LARGEST).to(FLOAT8)
    scales = (torch.rand(out_size, num_spans, device=device) + 0.5) * (in_size**-0.5 * 4 / _LARGEST)
    return Float8Weight(codes=codes, scales=scales)


def rounded_rows_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows `[T, K]` to FP8, `[T, K]`, with a scale for each, `[T]` float32.

    The largest magnitude of a row becomes 448. A row with a NaN or an infinity has zeros, and the scale NaN.
    """
    largest = x.float().abs().amax(dim=1)
    # A device may divide by a number by multiplying with its rounded inverse.
    scales = torch.where(largest.isfinite(), largest / torch.full_like(largest, _LARGEST), torch.nan)
    is_scaled = (scales > 0)[:, None]
    codes = torch.where(is_scaled, x.float() / torch.where(is_scaled, scales[:, None], 1.0), 0.0)
    return codes.to(FLOAT8), scales


def float8_linear_reference(x: Tensor, weight: Float8Weight, bias: Tensor | None = None) -> Tensor:
    """Multiply rows `[T, K]`, rounded, by `weight` transposed, in float64, plus `bias` `[N]`: rounded once."""
    codes, scales = rounded_rows_float8(x)
    exact = weight.codes.double() * spread(weight.scales.double(), x.shape[1])
    product = (codes.double() * scales.double()[:, None]) @ exact.T
    return (product if bias is None else product + bias.double()).to(x.dtype)
