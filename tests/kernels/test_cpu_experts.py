"""Mixtures of experts on the CPU: choices, shares and sums against the reference, whatever the neighbours of a row."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sluice.kernels.experts import Dense, Mixture, Router, SeparateExperts, route
from sluice.kernels.experts.reference import mixture_reference, route_reference
from sluice.kernels.linear import pack_gated_linear, pack_linear
from sluice.kernels.linear.native import Epilogue, NativeLinear

SIZE, INNER = 64, 64


def router_of(num_experts: int, num_chosen: int, dtype: torch.dtype, *, size: int = SIZE, **options: bool) -> Router:
    generator = torch.Generator().manual_seed(1)
    has_shared = options.get("has_shared", False)
    return Router(
        weight=torch.randn(num_experts + has_shared, size, generator=generator).to(dtype),
        bias=torch.randn(num_experts, generator=generator) if options.get("has_bias") else None,
        num_chosen=num_chosen,
        is_normalised=options.get("is_normalised", True),
        has_shared=has_shared,
    )


def rows(count: int, dtype: torch.dtype, size: int = SIZE) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
class TestGivenARouter:
    @pytest.mark.parametrize("has_shared", [False, True])
    @pytest.mark.parametrize("is_normalised", [False, True])
    @pytest.mark.parametrize(("num_experts", "num_chosen", "size"), [(4, 2, 64), (7, 7, 48), (130, 8, 96), (1, 1, 40)])
    def test_when_rows_are_routed_then_choices_and_shares_are_those_of_the_reference(
        self, num_experts: int, num_chosen: int, size: int, is_normalised: bool, has_shared: bool, dtype: torch.dtype
    ) -> None:
        options = {"is_normalised": is_normalised, "has_shared": has_shared, "has_bias": num_chosen == 2}
        router, x = router_of(num_experts, num_chosen, dtype, size=size, **options), rows(33, dtype, size)

        actual = route(x, router)

        wide = replace(router, weight=router.weight.double())
        expected = route_reference(x.double(), wide)
        torch.testing.assert_close(actual.experts, expected.experts)
        torch.testing.assert_close(actual.shares.double(), expected.shares, rtol=1e-5, atol=1e-6)
        assert (actual.shared is not None) == has_shared
        if actual.shared is not None:
            torch.testing.assert_close(actual.shared.double(), expected.shared, rtol=1e-5, atol=1e-6)

    def test_when_scores_are_equal_then_the_lower_id_is_first(self, dtype: torch.dtype) -> None:
        router = router_of(8, 4, dtype)
        router = replace(router, weight=router.weight[[0, 1, 0, 1, 0, 1, 0, 1]].contiguous())

        experts = route(rows(20, dtype), router).experts

        assert {tuple(row) for row in experts.tolist()} == {(0, 2, 4, 6), (1, 3, 5, 7)}

    def test_when_a_row_is_not_a_number_then_its_experts_are_different_ones_and_others_do_not_notice(
        self, dtype: torch.dtype
    ) -> None:
        router, x = router_of(8, 3, dtype), rows(5, dtype)
        sick = x.clone()
        sick[2, 5] = float("nan")

        actual, expected = route(sick, router), route(x, router)

        assert len({*actual.experts[2].tolist()}) == 3
        assert bool(actual.shares[2].isnan().all())
        well = [0, 1, 3, 4]
        assert torch.equal(actual.experts[well], expected.experts[well])
        assert torch.equal(actual.shares[well], expected.shares[well])


def mixture_of(dtype: torch.dtype, *, is_native: bool = False, is_int8: bool = False) -> Mixture:
    """A mixture of six experts and a shared one, two of the six for each row."""
    generator = torch.Generator().manual_seed(3)

    def dense() -> Dense:
        gate_up = (torch.randn(2 * INNER, SIZE, generator=generator) / 8).to(dtype)
        down = (torch.randn(SIZE, INNER, generator=generator) / 4).to(dtype)
        if is_native:
            gated = NativeLinear(gate_up, None, epilogue=Epilogue.GATE_SILU, is_int8=is_int8)
            return Dense(gated, NativeLinear(down, None, is_int8=is_int8))
        return Dense(pack_gated_linear(gate_up, activation="silu"), pack_linear(down))

    router = router_of(6, 2, dtype, has_shared=True)
    return Mixture(router=router, experts=SeparateExperts([dense() for _ in range(6)]), shared=dense())


class TestGivenAMixture:
    @pytest.mark.usefixtures("path")
    @pytest.mark.parametrize("num_rows", [0, 1, 5, 40])
    def test_when_rows_are_computed_then_they_are_the_sums_of_the_reference(self, num_rows: int) -> None:
        mixture, x = mixture_of(torch.float32), rows(num_rows, torch.float32)
        assert isinstance(mixture.experts, SeparateExperts)

        actual = mixture(x)

        expected = mixture_reference(x, mixture.router, mixture.experts.each, mixture.shared)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.usefixtures("native_path")
    @pytest.mark.parametrize("is_int8", [False, True])
    def test_when_a_row_has_neighbours_then_its_bits_do_not_change(self, is_int8: bool) -> None:
        mixture, x = mixture_of(torch.bfloat16, is_native=True, is_int8=is_int8), rows(70, torch.bfloat16)

        together = mixture(x)

        for first, end in ((0, 1), (3, 8), (16, 33), (40, 70)):
            assert torch.equal(mixture(x[first:end]), together[first:end])
        order = torch.randperm(70, generator=torch.Generator().manual_seed(4))
        assert torch.equal(mixture(x[order]), together[order])
