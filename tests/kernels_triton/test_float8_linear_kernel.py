"""Products with weights in FP8 against their definition in float64."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import pytest
import torch
from torch import Tensor

from sluice.kernels import chain
from sluice.kernels.linear import cuda
from sluice.kernels.linear.cuda import Float8Linear
from sluice.kernels.linear.float8 import (
    Float8Weight,
    float8_linear_reference,
    random_float8,
    rounded_rows_float8,
    stacked_float8,
)
from sluice.kernels.linear.float8_row import Float8RowConfig, float8_row_triton
from sluice.kernels.linear.float8_tiles import (
    Float8TilesConfig,
    float8_tiles_config,
    float8_tiles_triton,
    round_rows_triton,
)
from sluice.kernels.linear.reference import linear_reference
from tests.grids import cross_section
from tests.kernels_triton.devices import DEVICES
from tests.kernels_triton.rows import rows_and_bias
from tests.oracles.kernel_cases import FLOAT32_UNIT, Agreement, agreement, generator_on, random_tensor, same_bits

SPLIT = Float8TilesConfig(block_n=16, block_t=16, part_size=128, num_warps=4, num_stages=2)
ROW = Float8RowConfig(block_n=4, block_k=128, num_warps=1)


def float8_weight(out_size: int, in_size: int, span: int, device: str) -> Float8Weight:
    """Numbers of a model's size, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(in_size)
        return random_float8(span, out_size, in_size, torch.device(device))


def in_tiles(x: Tensor, weight: Float8Weight, bias: Tensor | None, config: Float8TilesConfig | None) -> Tensor:
    """The kernel's product, into memory that was NaN, between guards that must stay NaN."""
    out = torch.full((x.shape[0] + 2, weight.shape[0]), float("nan"), dtype=x.dtype, device=x.device)
    float8_tiles_triton(x, weight, bias, out=out[1:-1], config=config)
    assert out[0].isnan().all()
    assert out[-1].isnan().all()
    return out[1:-1]


def compared(out: Tensor, expected: Tensor, x: Tensor, weight: Float8Weight) -> Agreement:
    """Compare; sums of 128 products have fewer bits on the matrix unit of a GPU, 14 at least."""
    unit = 2.0**-13 if out.is_cuda else 8 * FLOAT32_UNIT * x.shape[1] ** 0.5
    return agreement(out, expected, unit * (x.double().abs() @ weight.dequantized(torch.float64).abs().T))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenAWeightInFloat8:
    @pytest.mark.parametrize(
        ("num_tokens", "out_size", "in_size", "span", "config"),
        cross_section([(1, 64, 256), (3, 17, 200), (17, 40, 128), (0, 8, 128), (18, 65, 640)], [0, 128], [None, SPLIT]),
    )
    def test_when_rows_are_multiplied_in_tiles_then_they_agree(
        self,
        device: str,
        dtype: torch.dtype,
        num_tokens: int,
        out_size: int,
        in_size: int,
        span: int,
        config: Float8TilesConfig | None,
    ) -> None:
        weight = float8_weight(out_size, in_size, span, device)
        x, bias = rows_and_bias(num_tokens, weight.shape, dtype, device)

        out = in_tiles(x, weight, bias, config)

        codes, scales = rounded_rows_float8(x)
        rows = codes.double() * scales.double()[:, None]
        expected = linear_reference(rows, weight.dequantized(torch.float64), None if bias is None else bias.double())
        assert compared(out, expected, x, weight).worst <= 1.0

    @pytest.mark.parametrize(("out_size", "in_size", "span"), cross_section([(9, 200), (4, 256), (1, 640)], [0, 128]))
    def test_when_one_row_is_multiplied_then_it_is_not_rounded(
        self, device: str, dtype: torch.dtype, out_size: int, in_size: int, span: int
    ) -> None:
        weight = float8_weight(out_size, in_size, span, device)
        x, bias = rows_and_bias(1, weight.shape, dtype, device)
        out = torch.full((2, out_size), float("nan"), dtype=dtype, device=device)

        float8_row_triton(x, weight, bias, out=out[:1], config=ROW)

        exact = weight.dequantized(torch.float64)
        expected = linear_reference(x.double(), exact, None if bias is None else bias.double())
        slack = 8 * FLOAT32_UNIT * in_size**0.5 * (x.double().abs() @ exact.abs().T)
        assert agreement(out[:1], expected, slack).worst <= 1.0
        assert out[1].isnan().all()

    def test_when_rows_are_rounded_then_codes_and_scales_are_those_of_the_definition(
        self, device: str, dtype: torch.dtype
    ) -> None:
        x = random_tensor(6, 300, dtype=dtype, generator=generator_on(device))
        x[1] = 0
        x[2] *= 2.0**-14
        x[3, 5] = float("inf")
        x[4, 7] = float("nan")

        codes, scales = round_rows_triton(x)

        expected, expected_scales = rounded_rows_float8(x)
        assert same_bits(codes, expected)
        assert same_bits(scales, expected_scales)

    def test_when_a_row_is_not_a_number_then_its_neighbours_do_not_notice(
        self, device: str, dtype: torch.dtype
    ) -> None:
        weight = float8_weight(20, 256, 128, device)
        x, _ = rows_and_bias(3, weight.shape, dtype, device)
        undisturbed = in_tiles(x, weight, None, SPLIT)
        x[1, 3] = float("nan")

        out = in_tiles(x, weight, None, SPLIT)

        assert out[1].isnan().all()
        assert same_bits(out[::2].contiguous(), undisturbed[::2].contiguous())

    def test_when_a_trial_failed_then_torch_multiplies_rows_as_they_are(
        self, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weight = float8_weight(20, 200, 128, device)
        x, bias = rows_and_bias(3, weight.shape, dtype, device)
        monkeypatch.setattr(cuda, "path_of", by_torch_operators)

        out = Float8Linear(weight, bias)(x)

        assert bias is not None
        exact = weight.dequantized(torch.float64)
        slack = 2 * torch.finfo(dtype).eps * (x.double().abs() @ exact.abs().T + bias.double().abs())
        assert agreement(out, x.double() @ exact.T + bias.double(), slack).worst <= 1.0


def by_torch_operators(_operation: str, _x: Tensor) -> chain.Path:
    """The choice after a failed trial."""
    return chain.Path.TORCH


class TestGivenTheDefinition:
    def test_when_rows_are_stacked_then_scales_are_of_spans_if_some_are(self) -> None:
        by_row, by_span = float8_weight(3, 256, 0, "cpu"), float8_weight(5, 256, 128, "cpu")

        stacked = stacked_float8([by_row, by_span])

        assert stacked.scales.shape == (8, 2)
        both = torch.cat([by_row.dequantized(torch.float32), by_span.dequantized(torch.float32)])
        assert torch.equal(stacked.dequantized(torch.float32), both)
        assert torch.equal(stacked.map(lambda part: part[2:4]).dequantized(torch.float32), both[2:4])

    def test_when_a_row_is_rounded_then_the_product_is_within_half_a_step_of_each_element(self) -> None:
        weight, x = float8_weight(8, 256, 128, "cpu"), torch.randn(3, 256)

        out = float8_linear_reference(x, weight)

        exact = x.double() @ weight.dequantized(torch.float64).T
        largest = x.double().abs() @ weight.dequantized(torch.float64).abs().T
        assert ((out - exact).abs() <= largest / 16).all()


class TestGivenTheConfigurations:
    @pytest.mark.parametrize("out_size", [1, 64, 4096, 28_672, 151_936])
    def test_when_one_is_chosen_then_parts_depend_on_the_weight_alone(self, out_size: int) -> None:
        for in_size in (32, 896, 4096, 14_336):
            configs = [
                float8_tiles_config(out_size=out_size, in_size=in_size, num_tokens=num_tokens)
                for num_tokens in (1, 16, 17, 64, 65, 512)
            ]

            assert len({config.part_size for config in configs}) == 1
            assert configs[0].part_size % 128 == 0
            assert configs[0].part_size >= min(in_size, 1024)
