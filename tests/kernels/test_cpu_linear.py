"""Prepared products against the product in float64."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import pytest
import torch

from sluice.kernels.gated_activation import Activation
from sluice.kernels.gated_activation.reference import gated_activation_reference
from sluice.kernels.linear import onednn, pack_linear
from sluice.kernels.linear.cpu import PackedLinear
from sluice.kernels.linear.int8 import quantized
from sluice.kernels.linear.native import Epilogue, NativeLinear
from sluice.kernels.linear.reference import linear_reference


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


@pytest.mark.usefixtures("native_path")
class TestGivenANativeProduct:
    """Weights in panels, for each instruction set that this machine can run."""

    @pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 15, 16, 17, 32, 33, 71])
    @pytest.mark.parametrize("shape", [(32, 64), (97, 128), (40, 192), (1, 64), (256, 512)])
    @pytest.mark.parametrize("is_int8", [False, True])
    def test_when_rows_are_multiplied_then_the_error_is_that_of_rounding(
        self, num_rows: int, shape: tuple[int, int], is_int8: bool
    ) -> None:
        x, weight, bias = _tensors(num_rows, shape, torch.bfloat16)
        x = _steps(x)

        actual = NativeLinear(weight, bias, is_int8=is_int8)(x)

        exact = _exact(x, weight, is_int8=is_int8) + bias.double()
        torch.testing.assert_close(actual.double(), exact, rtol=2**-8, atol=2**-12)

    def test_when_rows_are_rounded_to_int8_then_each_element_is_off_by_half_a_step(self) -> None:
        x, _, _ = _tensors(40, (64, 128), torch.bfloat16)
        unit = torch.eye(128, dtype=torch.bfloat16)

        seen = NativeLinear(unit, None, is_int8=True)(x)

        half_a_step = x.float().abs().amax(dim=1, keepdim=True) / 254
        assert bool(((seen.float() - x.float()).abs() <= 1.001 * half_a_step + seen.float().abs() * 2**-8).all())

    @pytest.mark.parametrize("is_int8", [False, True])
    def test_when_a_row_has_neighbours_then_its_bits_do_not_change(self, is_int8: bool) -> None:
        x, weight, bias = _tensors(71, (96, 256), torch.bfloat16)
        linear = NativeLinear(weight, bias, is_int8=is_int8)

        together = linear(x)

        for first, end in ((0, 1), (3, 8), (16, 33), (40, 71)):
            assert torch.equal(linear(x[first:end]), together[first:end])

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
    @pytest.mark.parametrize("is_int8", [False, True])
    def test_when_half_of_it_is_a_gate_then_it_is_applied_before_rounding(
        self, activation: Activation, is_int8: bool
    ) -> None:
        x, weight, bias = _tensors(35, (2 * 48, 128), torch.bfloat16)
        x = _steps(x)
        epilogue = Epilogue[f"GATE_{activation.upper()}"]

        actual = NativeLinear(weight, bias, epilogue=epilogue, is_int8=is_int8)(x)

        exact = _exact(x, weight, is_int8=is_int8) + bias.double()
        expected = gated_activation_reference(exact, activation=activation)
        torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=2**-12)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("is_int8", [False, True])
    def test_when_a_row_is_not_finite_then_it_stays_so_and_its_neighbours_do_not_notice(
        self, bad: float, is_int8: bool
    ) -> None:
        x, weight, _ = _tensors(20, (64, 128), torch.bfloat16)
        linear = NativeLinear(weight, None, is_int8=is_int8)
        sick = x.clone()
        sick[7, 100] = bad

        actual = linear(sick)

        assert not actual[7].isfinite().any()
        healthy = [row for row in range(20) if row != 7]
        assert torch.equal(actual[healthy], linear(x)[healthy])

    def test_when_rows_lie_in_a_wider_tensor_then_they_are_read_in_place(self) -> None:
        x, weight, bias = _tensors(9, (64, 128), torch.bfloat16)
        wide = torch.full((9, 200), float("nan"), dtype=torch.bfloat16)
        wide[:, 30:158] = x

        assert torch.equal(NativeLinear(weight, bias)(wide[:, 30:158]), NativeLinear(weight, bias)(x))

    def test_when_a_row_is_all_zeros_then_int8_gives_the_bias(self) -> None:
        _, weight, bias = _tensors(1, (64, 128), torch.bfloat16)

        actual = NativeLinear(weight, bias, is_int8=True)(torch.zeros(1, 128, dtype=torch.bfloat16))

        assert torch.equal(actual[0], bias)


class TestGivenAWeightForInt8:
    def test_when_it_is_quantized_then_each_row_is_within_half_a_step_of_its_own(self) -> None:
        weight = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 50)[:, None]
        weight[9] = 0

        narrow, scales = quantized(weight.bfloat16())

        errors = (narrow.float() * scales[:, None] - weight.bfloat16().float()).abs()
        assert bool((errors <= 0.5001 * scales[:, None]).all())
        assert narrow.abs().amax(dim=1).tolist() == [0 if row == 9 else 127 for row in range(50)]


class TestGivenWhatInt8CannotDo:
    @pytest.mark.parametrize(
        ("shape", "dtype", "says"),
        [((32, 96), torch.bfloat16, "multiple of 64"), ((32, 64), torch.float32, "bfloat16")],
    )
    def test_when_it_is_asked_for_then_the_error_says_why(
        self, shape: tuple[int, int], dtype: torch.dtype, says: str
    ) -> None:
        with pytest.raises(ValueError, match=says):
            pack_linear(torch.ones(shape, dtype=dtype), is_int8=True)


def _exact(x: torch.Tensor, weight: torch.Tensor, *, is_int8: bool) -> torch.Tensor:
    """The product in float64, over the weight as it is kept."""
    if not is_int8:
        return x.double() @ weight.double().T
    narrow, scales = quantized(weight)
    return x.double() @ (narrow.double() * scales.double()[:, None]).T


def _steps(x: torch.Tensor) -> torch.Tensor:
    """Rows like those of `x` that int8 keeps as they are: whole steps of a power of two, the largest 127 of them."""
    steps = (x.float() * 40).round().clamp(-126, 126)
    steps[:, :1] = 127
    return (steps / 32).to(x.dtype)


def _tensors(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, shape[1], generator=generator)
    weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    return x.to(dtype), weight.to(dtype), torch.randn(shape[0], generator=generator).to(dtype)
