"""Norm, gate and rotation on the CPU against their references, on every path."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import pytest
import torch

from sluice.kernels.gated_activation import Activation, gated_activation
from sluice.kernels.gated_activation.reference import gated_activation_reference
from sluice.kernels.rms_norm import add_rms_norm, rms_norm
from sluice.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference
from sluice.kernels.rope.cpu import rope_cpu
from sluice.kernels.rope.reference import rope_reference
from sluice.kernels.soft_cap import soft_cap
from tests.oracles.kernel_cases import added_norm_agreement, norm_agreement, soft_cap_agreement

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)]
NAN = float("nan")
EPS = 1e-5


def rows(num_rows: int, size: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Random rows inside a wider buffer whose rest is NaN."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.full((num_rows, size + 24), NAN, dtype=dtype)
    buffer[:, 8 : 8 + size] = torch.randn(num_rows, size, generator=generator).to(dtype) * 3
    return buffer[:, 8 : 8 + size]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("num_rows", [0, 7, 300])
@pytest.mark.parametrize("size", [1, 60, 769])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
class TestGivenRowsInAWiderBuffer:
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_when_they_are_normalised_then_only_they_change_and_equal_the_reference(
        self, num_rows: int, size: int, dtype: torch.dtype, tolerance: float, offset: float
    ) -> None:
        x, out = rows(num_rows, size, dtype), rows(num_rows, size, dtype, seed=1)
        weight = rows(1, size, dtype, seed=2)[0].contiguous()

        rms_norm(x, weight, eps=EPS, weight_offset=offset, out=out)

        expected = rms_norm_reference(x.double(), weight.double(), eps=EPS, weight_offset=offset)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        # A sum of weight and offset that were rounded would be off by less than any tolerance: the bits show it.
        assert dtype == torch.float32 or size < 60 or num_rows == 0 or _share_equal(out, expected) > 0.98
        assert out.untyped_storage().nbytes() == 0 or _guards_are_nan(out)

    def test_when_a_residual_is_added_then_it_is_updated_and_its_norm_returned(
        self, num_rows: int, size: int, dtype: torch.dtype, tolerance: float
    ) -> None:
        x, residual = rows(num_rows, size, dtype), rows(num_rows, size, dtype, seed=1)
        weight = rows(1, size, dtype, seed=2)[0].contiguous()
        expected, total = add_rms_norm_reference(x, residual, weight, eps=EPS)

        out = add_rms_norm(x, residual, weight, eps=EPS)

        assert torch.equal(residual, total)
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_when_the_norm_of_rows_is_added_then_it_is_rounded_before_the_sum_is(
        self, num_rows: int, size: int, dtype: torch.dtype, tolerance: float, offset: float
    ) -> None:
        x, residual = rows(num_rows, size, dtype), rows(num_rows, size, dtype, seed=1)
        weight, added_weight = (rows(1, size, dtype, seed=seed)[0].contiguous() for seed in (2, 3))
        before, added = x.clone(), residual.clone()
        rounded = residual + rms_norm(x, added_weight, eps=EPS, weight_offset=offset)

        add_rms_norm(x, residual, weight, eps=EPS, weight_offset=offset, added_weight=added_weight, out=x)

        assert added_norm_agreement(residual, before, added, added_weight, EPS, offset).holds
        assert norm_agreement(x, residual, weight, EPS, offset).holds
        # In float32 the product and the sum may be one operation.
        assert dtype == torch.float32 or torch.equal(residual, rounded)
        assert num_rows == 0 or (_guards_are_nan(x) and _guards_are_nan(residual))

    def test_when_their_mean_is_subtracted_then_they_equal_the_reference(
        self, num_rows: int, size: int, dtype: torch.dtype, tolerance: float
    ) -> None:
        x, residual = rows(num_rows, size, dtype) + 5, rows(num_rows, size, dtype, seed=1)
        weight = rows(1, size, dtype, seed=2)[0].contiguous()
        expected, total = add_rms_norm_reference(x, residual, weight, eps=EPS, is_centered=True)

        alone = rms_norm(total, weight, eps=EPS, is_centered=True)
        out = add_rms_norm(x, residual, weight, eps=EPS, is_centered=True)

        assert torch.equal(residual, total)
        assert torch.equal(alone, out)
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)

    def test_when_the_sum_is_not_normalised_then_it_is_what_is_returned(
        self, num_rows: int, size: int, dtype: torch.dtype, tolerance: float
    ) -> None:
        x, residual = rows(num_rows, size, dtype), rows(num_rows, size, dtype, seed=1)
        added_weight = rows(1, size, dtype, seed=2)[0].contiguous()
        _, total = add_rms_norm_reference(x, residual, None, eps=EPS, added_weight=added_weight)

        out = add_rms_norm(x, residual, None, eps=EPS, added_weight=added_weight)

        assert out is residual
        torch.testing.assert_close(out, total, rtol=tolerance, atol=tolerance)
        assert num_rows == 0 or _guards_are_nan(residual)

    @pytest.mark.parametrize("cap", [0.3, 30.0])
    def test_when_they_are_capped_then_each_is_within_rounding_of_float64_wherever_it_is(
        self, num_rows: int, size: int, dtype: torch.dtype, tolerance: float, cap: float
    ) -> None:
        x = rows(num_rows, size, dtype).contiguous() * 4
        before, reversed_x = x.clone(), x.flatten().flip(0).unsqueeze(0).clone()

        soft_cap(x, cap=cap)

        assert soft_cap_agreement(x, before, cap).holds
        assert torch.equal(soft_cap(reversed_x, cap=cap).flatten().flip(0), x.flatten())

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
    def test_when_they_are_gated_then_they_equal_the_reference(
        self, num_rows: int, size: int, dtype: torch.dtype, tolerance: float, activation: Activation
    ) -> None:
        gate_up, out = rows(num_rows, 2 * size, dtype), rows(num_rows, size, dtype, seed=1)

        gated_activation(gate_up, activation=activation, out=out)

        expected = gated_activation_reference(gate_up.double(), activation=activation)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("cap", [0.3, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
class TestGivenNumbersFarBelowTheCap:
    def test_when_they_are_capped_then_no_two_become_one(self, dtype: torch.dtype, cap: float) -> None:
        x = (torch.arange(-50, 51) * 1e-6).to(dtype).unsqueeze(0)
        before = x.clone()

        soft_cap(x, cap=cap)

        assert soft_cap_agreement(x, before, cap).holds
        assert (x.diff() > 0).all()


def _share_equal(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of elements that are the nearest of their dtype to what is expected."""
    return float((out == expected.to(out.dtype)).double().mean())


def _guards_are_nan(view: torch.Tensor) -> bool:
    num_rows, size = view.shape
    whole = view.as_strided((num_rows, size + 24), (size + 24, 1), 0)
    return bool(whole[:, :8].isnan().all() and whole[:, 8 + size :].isnan().all())


@pytest.mark.usefixtures("path")
class TestGivenExtremes:
    def test_when_a_gate_is_far_from_zero_then_it_saturates(self) -> None:
        gate_up = torch.tensor([[-1e4, -200.0, -88.0, 0.0, 200.0, 1e4] + [1.0] * 6])

        gated = gated_activation(gate_up)

        torch.testing.assert_close(gated, torch.tensor([[0.0, 0.0, 0.0, 0.0, 200.0, 1e4]]))

    def test_when_a_number_is_far_beyond_the_cap_then_it_becomes_the_cap_and_a_nan_stays(self) -> None:
        x = torch.tensor([[-float("inf"), -1e38, -1e4, -0.0, 0.0, 1e4, 1e38, float("inf"), NAN] * 2])

        soft_cap(x, cap=30.0)

        expected = torch.tensor([[-30.0, -30.0, -30.0, -0.0, 0.0, 30.0, 30.0, 30.0, NAN] * 2])
        torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)

    def test_when_a_row_is_zero_then_its_norm_is_zero(self) -> None:
        assert torch.equal(rms_norm(torch.zeros(2, 40), torch.ones(40), eps=EPS), torch.zeros(2, 40))

    def test_when_a_row_has_a_nan_then_that_row_alone_does(self) -> None:
        x = torch.ones(3, 40)
        x[1, 17] = NAN

        normed = rms_norm(x, torch.ones(40), eps=EPS)
        gated = gated_activation(x)

        assert normed.isnan().any(dim=1).tolist() == [False, True, False]
        assert gated.isnan().any(dim=1).tolist() == [False, True, False]


class TestGivenPositions:
    @pytest.mark.parametrize(("head_size", "rotary_size"), [(8, 8), (64, 64), (80, 32), (6, 0)])
    @pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
    def test_when_heads_are_rotated_then_they_equal_the_reference(
        self, head_size: int, rotary_size: int, dtype: torch.dtype, tolerance: float
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(9, 3, head_size, generator=generator).to(dtype)
        cos_sin = torch.randn(50, rotary_size, generator=generator)
        positions = torch.randint(50, (9,), generator=generator)

        actual = torch.empty_like(x)
        rope_cpu(x, positions, cos_sin, out=actual)

        expected = rope_reference(x.double(), positions, cos_sin)
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
