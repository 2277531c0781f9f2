"""Products over weights in groups of 32 against their definition, for each instruction set that this machine runs."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sluice.kernels.gated_activation import Activation
from sluice.kernels.gated_activation.reference import gated_activation_reference
from sluice.kernels.linear import pack_linear
from sluice.kernels.linear.grouped import (
    GROUP,
    UNIT_GROUPS,
    GroupedWeight,
    grouped,
    grouped_linear_reference,
    packed_nibbles,
    stacked,
    whole_codes,
)
from sluice.kernels.linear.native import Epilogue, NativeLinear
from tests.grids import cross_section

BITS = [4, 8]
NUM_ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 33]
FORMS = ["4 bits", "4 bits in units", "8 bits", "4 bits in spans", "8 bits in spans", "4 bits in ordered spans"]
SPAN = 2


def packed_as(form: str, weight: Tensor) -> GroupedWeight:
    """A matrix in groups; in units, one of its shape whose numbers are made up."""
    if " in " not in form:
        return grouped(weight, num_bits=int(form[0]))
    generator = torch.Generator().manual_seed(1)
    if "spans" in form:
        packed = in_spans(weight, int(form[0]), generator)
        order = torch.randperm(weight.shape[1], generator=generator).int()
        return replace(packed, order=order) if "ordered" in form else packed
    num_rows, num_groups = weight.shape[0], weight.shape[1] // GROUP
    scales, minimums = torch.randint(64, (2, num_rows, num_groups), generator=generator, dtype=torch.uint8)
    units = torch.randn(num_rows, 2 * (num_groups // UNIT_GROUPS), generator=generator) * 2e-4
    codes = torch.randint(16, tuple(weight.shape), generator=generator, dtype=torch.uint8)
    return GroupedWeight(codes=packed_nibbles(codes), scales=scales, minimums=minimums, units=units.half())


def in_spans(weight: Tensor, num_bits: int, generator: torch.Generator) -> GroupedWeight:
    """Made-up numbers of a matrix's shape, two groups of which share a scale and a zero."""
    num_rows, num_spans = weight.shape[0], max(1, weight.shape[1] // GROUP // SPAN)
    least, most = (0, 16) if num_bits == 4 else (-128, 128)
    codes = torch.randint(least, most, tuple(weight.shape), generator=generator)
    return GroupedWeight(
        codes=packed_nibbles(codes.to(torch.uint8)) if num_bits == 4 else codes.to(torch.int8),
        scales=torch.randn(num_rows, num_spans, generator=generator) * (0.1 if num_bits == 4 else 0.006),
        zeros=torch.randint(least, most, (num_rows, num_spans), generator=generator).to(torch.int8),
    )


def tensors(num_rows: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x, a weight and a bias."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, shape[1], generator=generator)
    weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    return x.bfloat16(), weight.bfloat16(), torch.randn(shape[0], generator=generator).bfloat16()


@pytest.mark.usefixtures("native_path")
class TestGivenANativeProductOverGroups:
    @pytest.mark.parametrize(
        ("num_rows", "shape", "form"),
        [
            *cross_section(NUM_ROWS, [((32, 64),), ((97, 128),), ((1, 32),), ((256, 544),)], ["4 bits", "8 bits"]),
            *cross_section(NUM_ROWS, [((97, 256),), ((64, 512),)], ["4 bits in units"]),
            *cross_section(NUM_ROWS, [((97, 192),), ((32, 64),), ((33, 32),)], ["4 bits in spans", "8 bits in spans"]),
            *cross_section(NUM_ROWS, [((97, 192),)], ["4 bits in ordered spans", "8 bits in ordered spans"]),
        ],
    )
    def test_when_rows_are_multiplied_then_products_equal_the_reference(
        self, num_rows: int, shape: tuple[int, int], form: str
    ) -> None:
        x, weight, bias = tensors(num_rows, shape)
        packed = packed_as(form, weight)

        actual = NativeLinear(packed, bias)(x)

        # Sums of groups are exact, and sums of sums in float32: one rounding to bfloat16 remains.
        torch.testing.assert_close(actual, grouped_linear_reference(x, packed, bias), rtol=2**-7, atol=2**-12)

    @pytest.mark.parametrize("form", FORMS)
    def test_when_a_row_has_neighbours_then_its_bits_do_not_change(self, form: str) -> None:
        x, weight, bias = tensors(71, (96, 256))
        linear = NativeLinear(packed_as(form, weight), bias)

        together = linear(x)

        for first, end in ((0, 1), (3, 8), (16, 33), (40, 71)):
            assert torch.equal(linear(x[first:end]), together[first:end])

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    def test_when_half_of_it_is_a_gate_then_it_is_applied_before_rounding(
        self, activation: Activation, form: str
    ) -> None:
        x, weight, bias = tensors(35, (2 * 48, 256))
        packed = packed_as(form, weight)
        epilogue = Epilogue.GATE_SILU if activation == "silu" else Epilogue.GATE_GELU_TANH

        actual = NativeLinear(packed, bias, epilogue=epilogue)(x)

        exact = grouped_linear_reference(x.double(), packed, bias)
        expected = gated_activation_reference(exact, activation=activation)
        torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=2**-12)

    @pytest.mark.parametrize(("num_bits", "code"), [(4, 15), (8, 127), (8, -128)])
    @pytest.mark.parametrize("sign", [1, -1])
    def test_when_all_codes_are_extreme_then_no_sum_of_a_group_overflows(
        self, num_bits: int, code: int, sign: int
    ) -> None:
        halves = torch.ones(32, 2, dtype=torch.float16)
        weight = (
            GroupedWeight(
                codes=packed_nibbles(torch.full((32, 64), code, dtype=torch.uint8)), scales=halves, minimums=halves
            )
            if num_bits == 4
            else GroupedWeight(codes=torch.full((32, 64), code, dtype=torch.int8), scales=halves, minimums=None)
        )
        x = torch.full((2, 64), 127.0 * sign, dtype=torch.bfloat16)

        actual = NativeLinear(weight, None)(x)

        assert actual.unique().tolist() == [
            float(torch.tensor(sign * 127.0 * 64 * (code + (num_bits == 4))).bfloat16())
        ]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("form", FORMS)
    def test_when_a_row_is_not_finite_then_it_stays_so_and_its_neighbours_do_not_notice(
        self, bad: float, form: str
    ) -> None:
        x, weight, _ = tensors(20, (64, 256))
        linear = NativeLinear(packed_as(form, weight), None)
        sick = x.clone()
        sick[7, 100] = bad

        actual = linear(sick)

        assert not actual[7].isfinite().any()
        healthy = [row for row in range(20) if row != 7]
        assert torch.equal(actual[healthy], linear(x)[healthy])

    @pytest.mark.parametrize("form", FORMS)
    def test_when_a_row_is_all_zeros_then_it_gives_the_bias(self, form: str) -> None:
        _, weight, bias = tensors(1, (64, 256))

        actual = NativeLinear(packed_as(form, weight), bias)(torch.zeros(1, 256, dtype=torch.bfloat16))

        assert torch.equal(actual[0], bias)

    def test_when_scales_are_as_small_as_float16_has_them_then_they_are_read(self) -> None:
        scales = torch.tensor([[2.0**-24, 2.0**-15, -65504.0, 3 * 2.0**-20]], dtype=torch.float16)
        weight = GroupedWeight(codes=torch.eye(GROUP, dtype=torch.int8)[:1].repeat(1, 4), scales=scales, minimums=None)
        x = torch.zeros(4, 4 * GROUP, dtype=torch.bfloat16)
        x[range(4), range(0, 4 * GROUP, GROUP)] = 1

        assert torch.equal(NativeLinear(weight, None)(x)[:, 0], scales[0].bfloat16())


def largest_of_groups(matrix: Tensor) -> Tensor:
    """The largest size in each group, `[N, K / 32]`."""
    return matrix.abs().view(matrix.shape[0], -1, GROUP).amax(dim=2)


class TestGivenAMatrix:
    @pytest.mark.parametrize("num_bits", BITS)
    def test_when_it_is_rounded_to_groups_then_each_element_is_within_half_a_step(self, num_bits: int) -> None:
        weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(0))
        weight.mul_(torch.logspace(-2, 2, 50)[:, None])
        weight[9] = 0

        packed = grouped(weight, num_bits=num_bits)

        errors = largest_of_groups(packed.dequantized(torch.float32) - weight)
        # Scale and minimum are rounded to float16: codes at the ends of a group are off by that, too.
        largest = largest_of_groups(weight)
        assert bool((errors <= 0.501 * packed.scales.float() + largest * 2**-9).all())
        assert packed.num_bits == num_bits
        assert packed.shape == weight.shape

    def test_when_codes_are_packed_then_they_come_back(self) -> None:
        codes = torch.randint(16, (3, 64), dtype=torch.uint8)
        halves = torch.zeros(3, 2, dtype=torch.float16)

        assert torch.equal(
            whole_codes(GroupedWeight(codes=packed_nibbles(codes), scales=halves, minimums=halves)), codes
        )

    def test_when_its_rows_are_no_whole_groups_then_it_is_refused(self) -> None:
        with pytest.raises(ValueError, match="multiple of 32, got 40"):
            grouped(torch.ones(2, 40), num_bits=4)


class TestGivenMatricesOfOneProduct:
    def test_when_bits_differ_then_all_have_eight(self) -> None:
        weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        few, many = grouped(weight[:5], num_bits=4), grouped(weight[5:], num_bits=8)

        together = stacked([few, many])

        assert together.num_bits == 8
        assert torch.equal(together.codes[5:], many.codes)
        wide = few.dequantized(torch.float32)
        error = (together.dequantized(torch.float32)[:5] - wide).abs().max()
        assert 0 < float(error) <= float(wide.abs().max()) / 250

    def test_when_orders_differ_then_all_are_rounded_to_eight_bits(self) -> None:
        draw = torch.Generator().manual_seed(0)
        codes = packed_nibbles(torch.randint(16, (4, 64), dtype=torch.uint8, generator=draw))
        spans = {"scales": torch.rand(4, 2, generator=draw), "zeros": torch.full((4, 2), 8, dtype=torch.int8)}
        orders = [torch.randperm(64, generator=draw).int() for _ in range(2)]
        apart = [GroupedWeight(codes=codes, **spans, order=order) for order in orders]

        together = stacked(apart)

        numbers = torch.cat([weight.dequantized(torch.float32) for weight in apart])
        assert (together.num_bits, together.order) == (8, None)
        assert torch.allclose(together.dequantized(torch.float32), numbers, atol=float(numbers.abs().max()) / 250)

    def test_when_a_bias_has_another_dtype_then_the_product_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"bias must be torch\.bfloat16"):
            pack_linear(grouped(torch.ones(32, 32), num_bits=4), torch.ones(32))
