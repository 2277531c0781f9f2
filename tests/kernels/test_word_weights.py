"""Weights in words, as a GPU reads them, against the packed forms that they are made of."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from dataclasses import replace

import pytest
import torch

from sluice.kernels.linear.grouped import GroupedWeight
from sluice.kernels.linear.int8 import rounded_to_int8
from sluice.kernels.linear.words import in_words
from tests.kernels.test_cpu_grouped import FORMS, in_spans, packed_as


class TestGivenAPackedWeight:
    @pytest.mark.parametrize("form", FORMS)
    def test_when_it_is_put_into_words_then_they_stand_for_the_same_numbers(self, form: str) -> None:
        packed = packed_as(form, torch.randn(5, 512))

        words = in_words(packed)

        # The product takes rows in the order of the weight.
        exact = replace(packed, order=None).dequantized(torch.float32)
        assert words.shape == packed.shape
        assert words.num_bits == packed.num_bits
        # Products of units are rounded to float16: scales of up to 15, and minimums.
        unit = 2.0**-12 if form == "4 bits in units" else 2.0**-22
        largest = float(words.scales.float().abs().max()) * (16 if packed.num_bits == 4 else 256)
        assert float((words.dequantized(torch.float32) - exact).abs().max()) <= 2 * unit * largest

    @pytest.mark.parametrize("form", ["4 bits", "8 bits"])
    def test_when_scales_are_of_groups_in_float16_then_no_bit_changes(self, form: str) -> None:
        packed = packed_as(form, torch.randn(7, 96))

        words = in_words(packed)

        assert words.scales.dtype == torch.float16
        assert torch.equal(words.dequantized(torch.bfloat16), packed.dequantized(torch.bfloat16))

    @pytest.mark.parametrize(("in_size", "spans", "expected"), [(96, 1, 1), (512, 4, 4), (512, 2, 4), (192, 2, 6)])
    def test_when_a_span_is_neither_a_row_nor_divides_128_then_it_is_several(
        self, in_size: int, spans: int, expected: int
    ) -> None:
        packed = spread(in_spans(torch.empty(3, in_size), 4, torch.Generator().manual_seed(2)), spans)

        words = in_words(packed)

        assert words.scales.shape == (3, expected, 2)
        torch.testing.assert_close(words.dequantized(torch.float32), packed.dequantized(torch.float32))

    def test_when_it_is_in_int8_then_a_row_has_one_scale(self) -> None:
        packed = rounded_to_int8(torch.randn(6, 64))

        words = in_words(packed)

        assert words.scales.shape == (6, 1, 2)
        torch.testing.assert_close(words.dequantized(torch.float32), packed.dequantized(torch.float32))

    def test_when_rows_are_selected_then_they_are_those_of_the_matrix(self) -> None:
        words = in_words(packed_as("4 bits", torch.randn(6, 64)))

        some = words.map(lambda part: part[2:5])

        assert torch.equal(some.dequantized(torch.float32), words.dequantized(torch.float32)[2:5])

    def test_when_bytes_are_counted_then_they_are_five_bits_an_element(self) -> None:
        assert in_words(packed_as("4 bits", torch.randn(4, 256))).num_bytes == 4 * 256 * 5 // 8


def spread(weight: GroupedWeight, spans: int) -> GroupedWeight:
    """A weight with so many spans, of the first numbers of its own."""
    assert weight.zeros is not None
    return replace(
        weight,
        scales=weight.scales[:, :1].expand(-1, spans).contiguous(),
        zeros=weight.zeros[:, :1].expand(-1, spans).contiguous(),
    )
