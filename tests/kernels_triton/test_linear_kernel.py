"""Products with weights in int8 against float64, over what the int8 stand for."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from sluice.kernels.linear import cuda
from sluice.kernels.linear.cuda import Int8Linear, pack_linear_cuda
from sluice.kernels.linear.few_rows import FewRowsConfig, few_rows_triton
from sluice.kernels.linear.int8 import MAX_IN_SIZE, dequantized, quantized
from sluice.kernels.linear.kernel import ProductConfig, int8_product_triton, product_config, widen_triton
from tests.grids import cross_section
from tests.kernels_triton.devices import DEVICES
from tests.oracles.kernel_cases import agreement, generator_on, product_agreement, random_tensor, same_bits

SPLIT = ProductConfig(block_n=64, block_t=16, block_k=32, num_parts=3, num_warps=4, num_stages=2)
FEW = FewRowsConfig(block_n=2, block_k=32, num_warps=1)


def narrow_weight(out_size: int, in_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Every int8, and scales of very different sizes."""
    wide = torch.randint(-127, 128, (out_size, in_size), generator=generator, device=generator.device)
    scales = torch.rand(out_size, generator=generator, device=generator.device) * 0.01 + 1e-4
    return wide.to(torch.int8), scales


def multiply(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, config: ProductConfig | None) -> Tensor:
    """The kernel's product, into memory that was NaN, between guards that must stay NaN."""
    out = torch.full((x.shape[0] + 2, weight.shape[0]), float("nan"), dtype=x.dtype, device=x.device)
    int8_product_triton(x, weight, scales, bias, out=out[1:-1], config=config)
    assert out[0].isnan().all()
    assert out[-1].isnan().all()
    return out[1:-1]


@contextmanager
def at_most(rows: int) -> Generator[None]:
    """Let products of more rows than these be the library's."""
    usual = cuda.MAX_KERNEL_ROWS
    cuda.MAX_KERNEL_ROWS = rows
    try:
        yield
    finally:
        cuda.MAX_KERNEL_ROWS = usual


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenAWeightInInt8:
    @pytest.mark.parametrize(
        ("num_tokens", "out_size", "in_size", "config"),
        cross_section(
            [(1, 64, 128), (2, 1, 1), (3, 65, 130), (7, 40, 96), (16, 48, 47), (17, 33, 48), (65, 16, 49), (0, 8, 8)],
            [None, SPLIT],
        ),
    )
    def test_when_rows_are_multiplied_then_they_agree(
        self,
        device: str,
        dtype: torch.dtype,
        num_tokens: int,
        out_size: int,
        in_size: int,
        config: ProductConfig | None,
    ) -> None:
        generator = generator_on(device)
        weight, scales = narrow_weight(out_size, in_size, generator)
        # A slice of a wider buffer: what lies next to a row is not read.
        x = random_tensor(num_tokens, in_size + 3, dtype=dtype, generator=generator)
        x[:, in_size:] = float("nan")
        bias = random_tensor(out_size, dtype=dtype, generator=generator) if num_tokens % 2 else None

        out = multiply(x[:, :in_size], weight, scales, bias, config)

        assert product_agreement(out, x[:, :in_size], weight, scales, bias).holds

    def test_when_the_last_of_k_and_of_n_is_all_there_is_then_it_is_not_lost(
        self, device: str, dtype: torch.dtype
    ) -> None:
        """One nonzero weight at the very corner: an off-by-one in any loop gives zero."""
        weight = torch.zeros(33, 145, dtype=torch.int8, device=device)
        weight[32, 144] = -127
        x = torch.zeros(17, 145, dtype=dtype, device=device)
        x[16, 144] = 2
        scales = torch.full((33,), 0.5, device=device)
        expected = torch.zeros(17, 33, dtype=dtype, device=device)
        expected[16, 32] = -127

        for config in (None, SPLIT):
            assert torch.equal(multiply(x, weight, scales, None, config), expected)

    def test_when_a_row_is_not_a_number_then_its_neighbours_do_not_notice(
        self, device: str, dtype: torch.dtype
    ) -> None:
        generator = generator_on(device)
        weight, scales = narrow_weight(20, 50, generator)
        x = random_tensor(3, 50, dtype=dtype, generator=generator)
        undisturbed = multiply(x, weight, scales, None, SPLIT)
        x[1, 3] = float("nan")

        out = multiply(x, weight, scales, None, SPLIT)

        assert out[1].isnan().all()
        assert same_bits(out[::2].contiguous(), undisturbed[::2].contiguous())

    def test_when_rows_tiles_or_parts_change_then_a_row_keeps_its_bits(self, device: str, dtype: torch.dtype) -> None:
        generator = generator_on(device)
        weight, scales = narrow_weight(48, 200, generator)
        x = random_tensor(20, 200, dtype=dtype, generator=generator)

        many = multiply(x, weight, scales, None, SPLIT)

        for num_rows, config in ((1, SPLIT), (1, None), (20, None)):
            assert same_bits(multiply(x[:num_rows], weight, scales, None, config), many[:num_rows])

    def test_when_an_element_is_a_million_times_the_others_then_they_still_count(
        self, device: str, dtype: torch.dtype
    ) -> None:
        weight = torch.ones(16, 64, dtype=torch.int8, device=device)
        weight[:, 0] = 0
        x = torch.full((1, 64), 0.0078125, dtype=dtype, device=device)
        x[0, 0] = 8192

        out = multiply(x, weight, torch.ones(16, device=device), None, None)

        assert torch.equal(out, torch.full_like(out, 63 / 128))

    @pytest.mark.parametrize("largest", [0.0, 2.0**-24, 65504.0])
    def test_when_all_of_a_row_is_tiny_or_huge_then_it_is_exact(
        self, device: str, dtype: torch.dtype, largest: float
    ) -> None:
        weight = torch.tensor([[-127, 127, 1]], dtype=torch.int8, device=device).repeat(16, 1)
        x = torch.tensor([[largest, -largest, 0.0]], dtype=dtype, device=device)

        out = multiply(x, weight, torch.full((16,), 2.0**-8, device=device), None, None)

        assert torch.equal(out, (x[:, :1].double() * -254 / 256).to(dtype).expand(1, 16))

    @pytest.mark.long
    def test_when_k_is_the_largest_then_nothing_overflows(self, device: str, dtype: torch.dtype) -> None:
        weight = torch.full((1, MAX_IN_SIZE), -127, dtype=torch.int8, device=device)
        x = torch.full((1, MAX_IN_SIZE), -127 / 64, dtype=dtype, device=device)

        out = multiply(x, weight, torch.full((1,), 2.0**-16, device=device), None, None)

        assert torch.allclose(out.double(), x[:, :1].double() * -127, rtol=torch.finfo(dtype).eps)

    @pytest.mark.parametrize(
        ("num_tokens", "out_size", "in_size"), cross_section([1, 2, 3, 4], [(1, 1), (5, 130), (8, 64)])
    )
    def test_when_rows_are_very_few_then_their_kernel_agrees_and_a_row_keeps_its_bits(
        self, device: str, dtype: torch.dtype, num_tokens: int, out_size: int, in_size: int
    ) -> None:
        generator = generator_on(device)
        weight, scales = narrow_weight(out_size, in_size, generator)
        x = random_tensor(num_tokens, in_size + 3, dtype=dtype, generator=generator)
        x[:, in_size:] = float("nan")
        x = x[:, :in_size]
        bias = random_tensor(out_size, dtype=dtype, generator=generator) if num_tokens % 2 else None
        out, wide, one = (
            torch.full((num_tokens + 1, out_size), float("nan"), dtype=dtype, device=device) for _ in "abc"
        )

        few_rows_triton(x, weight, scales, bias, out=out[:-1], config=FEW)
        few_rows_triton(x, dequantized(weight, torch.ones_like(scales), dtype), None, bias, out=wide[:-1])
        few_rows_triton(x[-1:], weight, scales, bias, out=one[:1], config=FEW)

        assert product_agreement(out[:-1], x, weight, scales, bias).holds
        assert product_agreement(wide[:-1], x, weight, torch.ones_like(scales), bias).holds
        assert out[-1].isnan().all()
        assert same_bits(one[0], out[-2])

    @pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5])
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_when_a_weight_is_kept_in_its_dtype_then_every_number_of_rows_agrees(
        self, device: str, dtype: torch.dtype, num_tokens: int, has_bias: bool
    ) -> None:
        """On a GPU the first four are our kernel's; anywhere else all are the library's."""
        generator = generator_on(device)
        narrow, _ = narrow_weight(37, 200, generator)
        ones = torch.ones(37, device=device)
        bias = random_tensor(37, dtype=dtype, generator=generator) if has_bias else None
        x = random_tensor(num_tokens, 200, dtype=dtype, generator=generator)

        out = pack_linear_cuda(narrow.to(dtype), bias, is_int8=False)(x)

        assert out.shape == (num_tokens, 37)
        assert product_agreement(out, x, narrow, ones, bias).holds

    def test_when_it_is_widened_then_it_is_what_the_int8_stand_for(self, device: str, dtype: torch.dtype) -> None:
        weight, scales = narrow_weight(9, 130, generator_on(device))
        out = torch.full((9, 130), float("nan"), dtype=dtype, device=device)

        widen_triton(weight, scales, out=out)

        assert same_bits(out, dequantized(weight, scales, dtype))

    def test_when_rows_are_too_many_for_the_kernel_then_the_library_gives_the_same(
        self, device: str, dtype: torch.dtype
    ) -> None:
        generator = generator_on(device)
        wide = random_tensor(40, 64, dtype=dtype, generator=generator)
        bias = random_tensor(40, dtype=dtype, generator=generator)
        linear = Int8Linear(wide, bias)
        x = random_tensor(5, 64, dtype=dtype, generator=generator)

        few = linear(x)
        with at_most(4):
            many = linear(x)

        narrow, scales = quantized(wide)
        assert product_agreement(few, x, narrow, scales, bias).holds
        # The library's weight is rounded once more.
        exact = dequantized(narrow, scales, torch.float64)
        slack = 2 * torch.finfo(dtype).eps * (x.double().abs() @ exact.abs().T)
        assert agreement(many, x.double() @ exact.T + bias.double(), slack).worst <= 1.0


class TestGivenTheConfigurations:
    @pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 17, 64, 256])
    @pytest.mark.parametrize("out_size", [1, 64, 3072, 4096, 28_672, 151_936])
    def test_when_one_is_chosen_then_parts_are_long_enough_and_no_more_than_fill_a_card(
        self, num_tokens: int, out_size: int
    ) -> None:
        for in_size in (1, 64, 1024, 4096, 14_336):
            config = product_config(out_size=out_size, in_size=in_size, num_tokens=num_tokens)
            num_programs = -(-out_size // config.block_n) * -(-num_tokens // config.block_t)

            assert config.num_parts == 1 or in_size // config.num_parts >= 16 * config.block_k
            assert config.num_parts == 1 or config.num_parts * num_programs <= 2 * 132


class TestGivenWhatInt8CannotDo:
    def test_when_a_model_is_in_float32_then_the_error_says_so(self) -> None:
        with pytest.raises(ValueError, match="float16 or bfloat16"):
            pack_linear_cuda(torch.ones(32, 64), None, is_int8=True)
