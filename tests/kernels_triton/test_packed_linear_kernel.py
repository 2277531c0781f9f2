"""Products with weights of 4 and 8 bits in words against float64, over the numbers that they stand for."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sluice.kernels import chain
from sluice.kernels.linear import cuda
from sluice.kernels.linear.cuda import PackedLinear
from sluice.kernels.linear.word_row import WordRowConfig, word_row_triton
from sluice.kernels.linear.word_tiles import WordTilesConfig, widen_words_triton, word_tiles_config, word_tiles_triton
from sluice.kernels.linear.words import BIASES, WordWeight
from tests.grids import cross_section
from tests.kernels_triton.devices import DEVICES
from tests.kernels_triton.rows import rows_and_bias
from tests.oracles.kernel_cases import (
    FLOAT32_UNIT,
    UNITS,
    generator_on,
    packed_agreement,
    random_tensor,
    same_bits,
)

FORMS = [(4, 32, torch.float16), (4, 128, torch.float32), (4, 0, torch.float32), (8, 32, torch.float16)]
"""Bits, elements of a span (0: a row) and dtype of scales."""

ROWS = WordRowConfig(block_n=4, block_k=256, num_warps=1)
SPLIT = WordTilesConfig(block_n=16, block_t=16, block_k=128, part_size=128, num_warps=4, num_stages=2)

Multiply = Callable[..., None]


def by_torch_operators(_operation: str, _x: Tensor) -> chain.Path:
    """The choice after a failed trial."""
    return chain.Path.TORCH


def word_weight(out_size: int, in_size: int, form: tuple[int, int, torch.dtype], device: str) -> WordWeight:
    """Every code, and scales of very different sizes."""
    bits, span, dtype = form
    generator = generator_on(device)
    codes = torch.randint(-(2**31), 2**31, (out_size, in_size * bits // 32), generator=generator, device=device)
    scales = random_tensor(out_size, in_size // (span or in_size), 2, dtype=dtype, generator=generator)
    return WordWeight(codes=codes.int(), scales=scales * 0.02, num_bits=bits)


def product_of(multiply: Multiply, x: Tensor, weight: WordWeight, bias: Tensor | None, config: object = None) -> Tensor:
    """A kernel's product, into memory that was NaN, between guards that must stay NaN."""
    out = torch.full((x.shape[0] + 2, weight.shape[0]), float("nan"), dtype=x.dtype, device=x.device)
    multiply(x, weight, bias, out=out[1:-1], config=config)
    assert out[0].isnan().all()
    assert out[-1].isnan().all()
    return out[1:-1]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenAWeightInWords:
    @pytest.mark.parametrize(
        ("seed", "out_size", "in_size", "form"),
        cross_section([(1, 9, 384), (2, 4, 256), (3, 1, 128), (4, 6, 640)], [(form,) for form in FORMS]),
    )
    def test_when_one_row_is_multiplied_then_it_agrees(
        self,
        device: str,
        dtype: torch.dtype,
        seed: int,
        out_size: int,
        in_size: int,
        form: tuple[int, int, torch.dtype],
    ) -> None:
        weight = word_weight(out_size, in_size, form, device)
        x, bias = rows_and_bias(seed, weight.shape, dtype, device)
        x = x[-1:]

        out = product_of(word_row_triton, x, weight, bias, ROWS)

        assert packed_agreement(out, x, weight, bias, is_rounded=False).holds

    @pytest.mark.parametrize(
        ("num_tokens", "out_size", "in_size", "config", "form"),
        cross_section(
            [(1, 64, 512), (3, 17, 384), (17, 40, 128), (0, 8, 128), (18, 65, 640)],
            [None, SPLIT],
            [(form,) for form in FORMS],
        ),
    )
    def test_when_rows_are_multiplied_in_tiles_then_they_agree(
        self,
        device: str,
        dtype: torch.dtype,
        num_tokens: int,
        out_size: int,
        in_size: int,
        config: WordTilesConfig | None,
        form: tuple[int, int, torch.dtype],
    ) -> None:
        weight = word_weight(out_size, in_size, form, device)
        x, bias = rows_and_bias(num_tokens, weight.shape, dtype, device)

        out = product_of(word_tiles_triton, x, weight, bias, config)

        assert packed_agreement(out, x, weight, bias, is_rounded=True).holds

    @pytest.mark.parametrize("form", [(form,) for form in FORMS[::3]])
    def test_when_a_row_is_not_a_number_then_its_neighbours_do_not_notice(
        self, device: str, dtype: torch.dtype, form: tuple[tuple[int, int, torch.dtype]]
    ) -> None:
        weight = word_weight(20, 128, form[0], device)
        x, _ = rows_and_bias(3, weight.shape, dtype, device)
        undisturbed = product_of(word_tiles_triton, x, weight, None, SPLIT)
        x[1, 3] = float("nan")

        out = product_of(word_tiles_triton, x, weight, None, SPLIT)

        assert out[1].isnan().all()
        assert same_bits(out[::2].contiguous(), undisturbed[::2].contiguous())

    @pytest.mark.parametrize("form", [(form,) for form in FORMS])
    def test_when_it_is_widened_then_the_numbers_are_those_it_stands_for(
        self, device: str, dtype: torch.dtype, form: tuple[tuple[int, int, torch.dtype]]
    ) -> None:
        weight = word_weight(9, 384, form[0], device)
        out = torch.full((9, 384), float("nan"), dtype=dtype, device=device)

        widen_words_triton(weight, out=out)

        # Products of scales and biases cancel.
        largest = float(weight.scales.float().abs().max()) * max(BIASES[weight.num_bits])
        torch.testing.assert_close(
            out.float(), weight.dequantized(torch.float32), rtol=UNITS[dtype], atol=2 * FLOAT32_UNIT * largest
        )

    def test_when_rows_are_many_then_each_way_gives_the_same(
        self, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weight = word_weight(40, 256, FORMS[0], device)
        x, bias = rows_and_bias(5, weight.shape, dtype, device)
        linear = PackedLinear(weight, bias)

        few = linear(x)
        monkeypatch.setattr(cuda, "MAX_PACKED_ROWS", 4)
        many = linear(x)
        monkeypatch.setattr(cuda, "path_of", by_torch_operators)
        by_torch = linear(x)

        for out in (few, many, by_torch):
            assert packed_agreement(out, x, weight, bias, is_rounded=True).holds


class TestGivenTheConfigurations:
    @pytest.mark.parametrize("out_size", [1, 64, 4096, 28_672, 151_936])
    def test_when_one_is_chosen_then_parts_depend_on_the_weight_alone(self, out_size: int) -> None:
        for in_size in (32, 896, 4096, 14_336):
            configs = [
                word_tiles_config(out_size=out_size, in_size=in_size, num_tokens=num_tokens, num_bits=4)
                for num_tokens in (1, 16, 17, 64, 65, 512)
            ]

            assert len({(config.block_k, config.part_size) for config in configs}) == 1
            assert configs[0].part_size % configs[0].block_k == 0
            assert configs[0].part_size >= min(in_size, 1024)
