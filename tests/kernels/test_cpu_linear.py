"""Prepared products against the product in float64."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import pytest
import torch

from kernels.linear import onednn, pack_linear
from kernels.linear.cpu import PackedLinear
from kernels.linear.reference import linear_reference


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(40, 24), (768, 512)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str)
class TestGivenAWeight:
    @pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 17])
    def test_when_it_is_prepared_then_products_equal_the_reference(
        self, num_rows: int, shape: tuple[int, int], has_bias: bool, dtype: torch.dtype, tolerance: float
    ) -> None:
        x, weight, bias = _tensors(num_rows, shape, dtype)
        linear = pack_linear(weight, bias if has_bias else None)

        actual = linear(x)

        expected = linear_reference(x, weight, bias if has_bias else None)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("num_rows", [0, 1, 4, 5])
    def test_when_few_rows_are_padded_then_products_equal_the_reference(
        self, num_rows: int, shape: tuple[int, int], has_bias: bool, dtype: torch.dtype, tolerance: float
    ) -> None:
        x, weight, bias = _tensors(num_rows, shape, dtype)
        packed = onednn.reorder(weight)
        if packed is None:
            pytest.skip(f"oneDNN prepacks no {dtype} here")

        actual = PackedLinear(packed, bias if has_bias else None, 4)(x)

        expected = linear_reference(x, weight, bias if has_bias else None)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def _tensors(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, shape[1], generator=generator)
    weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    return x.to(dtype), weight.to(dtype), torch.randn(shape[0], generator=generator).to(dtype)
