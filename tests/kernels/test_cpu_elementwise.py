"""Norm, gate and rotation on the CPU against their references, on every path."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import pytest
import torch

from kernels.gated_activation import Activation, gated_activation
from kernels.gated_activation.reference import gated_activation_reference
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference
from kernels.rope import rope
from kernels.rope.reference import rope_reference

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)]
NAN = float("nan")


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
    def test_when_they_are_normalised_then_they_equal_the_reference_and_nothing_else_changes(
        self, num_rows: int, size: int, dtype: torch.dtype, tolerance: float
    ) -> None:
        x, out = rows(num_rows, size, dtype), rows(num_rows, size, dtype, seed=1)
        weight = rows(1, size, dtype, seed=2)[0].contiguous()

        rms_norm(x, weight, eps=1e-5, out=out)

        expected = rms_norm_reference(x.double(), weight.double(), eps=1e-5)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        assert out.untyped_storage().nbytes() == 0 or _guards_are_nan(out)

    def test_when_a_residual_is_added_then_it_is_updated_and_its_norm_returned(
        self, num_rows: int, size: int, dtype: torch.dtype, tolerance: float
    ) -> None:
        x, residual = rows(num_rows, size, dtype), rows(num_rows, size, dtype, seed=1)
        weight = rows(1, size, dtype, seed=2)[0].contiguous()
        expected, total = add_rms_norm_reference(x, residual, weight, eps=1e-5)

        out = add_rms_norm(x, residual, weight, eps=1e-5)

        assert torch.equal(residual, total)
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    def test_when_they_are_gated_then_they_equal_the_reference(
        self, num_rows: int, size: int, dtype: torch.dtype, tolerance: float, activation: Activation
    ) -> None:
        gate_up, out = rows(num_rows, 2 * size, dtype), rows(num_rows, size, dtype, seed=1)

        gated_activation(gate_up, activation=activation, out=out)

        expected = gated_activation_reference(gate_up.double(), activation=activation)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


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

    def test_when_a_row_is_zero_then_its_norm_is_zero(self) -> None:
        assert torch.equal(rms_norm(torch.zeros(2, 40), torch.ones(40), eps=1e-5), torch.zeros(2, 40))

    def test_when_a_row_has_a_nan_then_that_row_alone_does(self) -> None:
        x = torch.ones(3, 40)
        x[1, 17] = NAN

        normed = rms_norm(x, torch.ones(40), eps=1e-5)
        gated = gated_activation(x)

        assert normed.isnan().any(dim=1).tolist() == [False, True, False]
        assert gated.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize(("head_size", "rotary_size"), [(8, 8), (64, 64), (80, 32), (6, 0)])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
def test_rope_equals_its_reference(head_size: int, rotary_size: int, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, head_size, generator=generator).to(dtype)
    cos_sin = torch.randn(50, rotary_size, generator=generator)
    positions = torch.randint(50, (9,), generator=generator)

    actual = rope(x, positions, cos_sin)

    expected = rope_reference(x.double(), positions, cos_sin)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
