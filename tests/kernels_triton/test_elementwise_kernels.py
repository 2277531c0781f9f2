"""The elementwise kernels against float64."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import pytest
import torch

from sluice.kernels.gated_activation import Activation
from sluice.kernels.gated_activation.kernel import gated_activation_triton
from sluice.kernels.rms_norm.kernel import rms_norm_triton
from sluice.kernels.rms_norm.reference import rms_norm_reference
from sluice.kernels.soft_cap.kernel import soft_cap_triton
from tests.kernels_triton.devices import DEVICES
from tests.oracles.kernel_cases import (
    added_norm_agreement,
    gate_agreement,
    generator_on,
    layer_norm_agreement,
    norm_agreement,
    random_tensor,
    same_bits,
    soft_cap_agreement,
)

EPS = 1e-6


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenRows:
    @pytest.mark.parametrize(("num_tokens", "hidden_size"), [(1, 1), (2, 60), (7, 64), (3, 576), (2, 2048), (0, 64)])
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_when_they_are_normalised_then_each_is_within_rounding_of_float64(
        self, device: str, dtype: torch.dtype, num_tokens: int, hidden_size: int, offset: float
    ) -> None:
        generator = generator_on(device)
        x = random_tensor(num_tokens, hidden_size + 5, dtype=dtype, generator=generator, spread=3)[:, :hidden_size]
        weight = random_tensor(hidden_size, dtype=dtype, generator=generator)
        out = torch.full((num_tokens, hidden_size), float("nan"), dtype=dtype, device=device)

        rms_norm_triton(x, weight, eps=EPS, weight_offset=offset, out=out)

        assert norm_agreement(out, x, weight, EPS, offset).holds

    @pytest.mark.parametrize(("num_tokens", "hidden_size"), [(1, 64), (5, 60), (3, 896), (0, 64)])
    def test_when_a_residual_is_added_then_it_is_stored_and_its_norm_returned(
        self, device: str, dtype: torch.dtype, num_tokens: int, hidden_size: int
    ) -> None:
        generator = generator_on(device)
        x, residual = (random_tensor(num_tokens, hidden_size, dtype=dtype, generator=generator) for _ in range(2))
        weight = random_tensor(hidden_size, dtype=dtype, generator=generator)
        total = residual + x
        # Which sum is normalised, the rounded one or the exact one, no tolerance shows; the bits do.
        expected = rms_norm_reference(total, weight, eps=EPS)

        rms_norm_triton(x, weight, residual=residual, eps=EPS, out=x)

        assert same_bits(residual, total)
        assert norm_agreement(x, total, weight, EPS).holds
        assert dtype == torch.float32 or num_tokens == 0 or float((x == expected).double().mean()) > 0.98

    @pytest.mark.parametrize("offset", [0.0, 1.0])
    @pytest.mark.parametrize(("num_tokens", "hidden_size"), [(1, 1), (2, 60), (3, 576), (0, 64)])
    def test_when_their_norm_is_added_then_it_is_rounded_before_the_sum_is(
        self, device: str, dtype: torch.dtype, num_tokens: int, hidden_size: int, offset: float
    ) -> None:
        generator = generator_on(device)
        x, residual = (random_tensor(num_tokens, hidden_size, dtype=dtype, generator=generator) for _ in range(2))
        weight, added_weight = random_tensor(2, hidden_size, dtype=dtype, generator=generator).unbind()
        before, added = residual.clone(), x.clone()
        expected = residual + rms_norm_reference(x, added_weight, eps=EPS, weight_offset=offset)

        rms_norm_triton(x, weight, residual=residual, eps=EPS, weight_offset=offset, added_weight=added_weight, out=x)

        assert added_norm_agreement(residual, added, before, added_weight, EPS, offset).holds
        assert norm_agreement(x, residual, weight, EPS, offset).holds
        # Which norm is added, the rounded one or the exact one, no tolerance shows; the bits do.
        assert dtype == torch.float32 or num_tokens == 0 or float((residual == expected).double().mean()) > 0.98

    @pytest.mark.parametrize(("num_tokens", "hidden_size"), [(2, 60), (3, 576), (0, 64)])
    def test_when_their_mean_is_subtracted_then_each_is_within_rounding_of_float64(
        self, device: str, dtype: torch.dtype, num_tokens: int, hidden_size: int
    ) -> None:
        generator = generator_on(device)
        x = random_tensor(num_tokens, hidden_size, dtype=dtype, generator=generator, spread=3) + 2
        weight = random_tensor(hidden_size, dtype=dtype, generator=generator)
        out = torch.full_like(x, float("nan"))

        rms_norm_triton(x, weight, eps=EPS, is_centered=True, out=out)

        assert layer_norm_agreement(out, x, weight, EPS).holds

    def test_when_the_sum_is_not_normalised_then_only_the_residual_changes(
        self, device: str, dtype: torch.dtype
    ) -> None:
        generator = generator_on(device)
        x, residual = (random_tensor(3, 60, dtype=dtype, generator=generator) for _ in range(2))
        before, total = x.clone(), residual + x

        rms_norm_triton(x, None, residual=residual, eps=EPS, out=x)

        assert same_bits(residual, total)
        assert same_bits(x, before)

    def test_when_a_weight_is_stored_as_an_offset_from_one_then_the_sum_is_not_rounded(
        self, device: str, dtype: torch.dtype
    ) -> None:
        x = random_tensor(2, 60, dtype=dtype, generator=generator_on(device))
        weight = torch.full((60,), 2.0**-14, dtype=dtype, device=device)  # lost next to 1 in 16 bits
        out = torch.empty(2, 60, dtype=torch.float32, device=device)

        rms_norm_triton(x, weight, eps=EPS, weight_offset=1.0, out=out)

        assert norm_agreement(out, x, weight, EPS, 1.0).holds

    @pytest.mark.parametrize("cap", [0.3, 30.0])
    @pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 60), (2, 1100), (0, 16)])
    def test_when_they_are_capped_then_each_is_within_rounding_of_float64(
        self, device: str, dtype: torch.dtype, num_tokens: int, size: int, cap: float
    ) -> None:
        x = random_tensor(num_tokens, size, dtype=dtype, generator=generator_on(device), spread=12)
        before = x.clone()

        soft_cap_triton(x, cap=cap)

        assert soft_cap_agreement(x, before, cap).holds

    @pytest.mark.parametrize("cap", [0.3, 30.0])
    def test_when_numbers_far_below_the_cap_are_capped_then_no_two_become_one(
        self, device: str, dtype: torch.dtype, cap: float
    ) -> None:
        x = (torch.arange(-50, 51, device=device) * 1e-6).to(dtype).unsqueeze(0)
        before = x.clone()

        soft_cap_triton(x, cap=cap)

        assert soft_cap_agreement(x, before, cap).holds
        assert (x.diff() > 0).all()

    def test_when_a_number_is_far_beyond_the_cap_then_it_becomes_the_cap_and_a_nan_stays(
        self, device: str, dtype: torch.dtype
    ) -> None:
        infinity, nan = float("inf"), float("nan")
        x = torch.tensor([[-infinity, -6e4, 0.0, 6e4, infinity, nan]], dtype=dtype, device=device)

        soft_cap_triton(x, cap=30.0)

        expected = torch.tensor([[-30.0, -30.0, 0.0, 30.0, 30.0, nan]], dtype=dtype, device=device)
        torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)

    def test_when_a_row_is_zero_or_huge_then_its_norm_is_finite(self, device: str, dtype: torch.dtype) -> None:
        x = torch.zeros(3, 64, dtype=dtype, device=device)
        x[1] = 1e4  # its square is beyond float16
        x[2, 3] = 6e4
        weight = torch.ones(64, dtype=dtype, device=device)

        out = torch.empty_like(x)
        rms_norm_triton(x, weight, eps=EPS, out=out)

        assert norm_agreement(out, x, weight, EPS).holds

    def test_when_rows_lie_in_a_wider_buffer_then_nothing_beside_them_is_touched(
        self, device: str, dtype: torch.dtype
    ) -> None:
        generator = generator_on(device)
        x = random_tensor(4, 60, dtype=dtype, generator=generator)
        buffer = torch.full((4, 70), float("nan"), dtype=dtype, device=device)
        residuals = torch.full((4, 70), float("nan"), dtype=dtype, device=device)
        residuals[:, 5:65] = 1

        rms_norm_triton(x, x[0].contiguous(), residual=residuals[:, 5:65], eps=EPS, out=buffer[:, 5:65])

        for guarded in (buffer, residuals):
            assert guarded[:, :5].isnan().all()
            assert guarded[:, 65:].isnan().all()
            assert not guarded[:, 5:65].isnan().any()

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
    @pytest.mark.parametrize(("num_tokens", "intermediate_size"), [(1, 1), (3, 60), (2, 1100), (5, 128), (0, 16)])
    def test_when_they_are_gated_then_each_is_within_rounding_of_float64(
        self, device: str, dtype: torch.dtype, activation: Activation, num_tokens: int, intermediate_size: int
    ) -> None:
        generator = generator_on(device)
        width = 2 * intermediate_size
        gate_up = random_tensor(num_tokens, width + 3, dtype=dtype, generator=generator, spread=4)[:, :width]
        out = torch.full((num_tokens, intermediate_size + 2), float("nan"), dtype=dtype, device=device)

        gated_activation_triton(gate_up, activation=activation, out=out[:, :intermediate_size])

        assert gate_agreement(out[:, :intermediate_size], gate_up, activation).holds
        assert out[:, intermediate_size:].isnan().all()

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    def test_when_a_gate_is_far_from_zero_then_it_is_open_or_shut_and_never_nan(
        self, device: str, dtype: torch.dtype, activation: Activation
    ) -> None:
        gate = torch.tensor([-6e4, -300.0, 300.0, 6e4], dtype=dtype, device=device)
        gate_up = torch.cat([gate, torch.ones_like(gate)]).unsqueeze(0)

        out = torch.empty(1, 4, dtype=dtype, device=device)
        gated_activation_triton(gate_up, activation=activation, out=out)

        assert torch.equal(out, gate.clamp(min=0).unsqueeze(0))
