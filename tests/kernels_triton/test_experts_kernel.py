"""Mixtures of experts in Triton: right, and the same bits for a row in any batch."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sluice.kernels.experts import Router, Routing, Stacked, StackedExperts
from sluice.kernels.experts.cpu import combine_torch, grouped_rows
from sluice.kernels.experts.kernel import experts_triton, route_triton
from sluice.kernels.experts.reference import route_reference
from tests.grids import grid
from tests.kernels_triton.devices import DEVICES
from tests.kernels_triton.invariant.matrix_unit import matrix_unit
from tests.oracles.kernel_cases import generator_on, random_tensor

SIZE, INNER = 40, 24
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(*shape: int, device: str, dtype: torch.dtype, seed: int) -> Tensor:
    return random_tensor(*shape, dtype=dtype, generator=generator_on(device, seed)) / shape[-1] ** 0.5


def router_of(num_experts: int, num_chosen: int, device: str, dtype: torch.dtype, *, has_all: bool = True) -> Router:
    """A router with a bias and a shared expert whose shares are those of all, or without any of these."""
    weight = random(num_experts + has_all, SIZE, device=device, dtype=dtype, seed=1)
    bias = random(num_experts, device=device, dtype=torch.float32, seed=2) if has_all else None
    return Router(
        weight=weight * SIZE**0.5, bias=bias, num_chosen=num_chosen, is_normalised=not has_all, has_shared=has_all
    )


def experts_of(num_experts: int, device: str, dtype: torch.dtype, *, is_int8: bool = False) -> StackedExperts:
    def stacked(out_size: int, in_size: int, seed: int) -> Stacked:
        weight = random(num_experts, out_size, in_size, device=device, dtype=dtype, seed=seed)
        bias = random(num_experts, out_size, device=device, dtype=dtype, seed=seed + 1)
        return Stacked.of(weight, None if is_int8 else bias, is_int8=is_int8)

    return StackedExperts(
        gate_up=stacked(2 * INNER, SIZE, 3), down=stacked(SIZE, INNER, 5), activation="gelu_tanh" if is_int8 else "silu"
    )


def rows(count: int, device: str, dtype: torch.dtype) -> Tensor:
    return random(count, SIZE, device=device, dtype=dtype, seed=7) * SIZE**0.5


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenARouter:
    @pytest.mark.parametrize("has_all", [False, True])
    @pytest.mark.parametrize(("num_experts", "num_chosen"), [(1, 1), (6, 2), (33, 5)])
    def test_when_rows_are_routed_then_choices_and_shares_are_those_of_the_reference(
        self, num_experts: int, num_chosen: int, has_all: bool, device: str, dtype: torch.dtype
    ) -> None:
        router = router_of(num_experts, num_chosen, device, dtype, has_all=has_all)
        x = rows(9, device, dtype)

        actual = route_triton(x, router)

        expected = route_reference(x.double(), replace(router, weight=router.weight.double()))
        assert torch.equal(actual.experts, expected.experts)
        torch.testing.assert_close(actual.shares.double(), expected.shares, rtol=1e-5, atol=1e-6)
        if actual.shared is not None and expected.shared is not None:
            torch.testing.assert_close(actual.shared.double(), expected.shared, rtol=1e-5, atol=1e-6)
        assert (actual.shared is not None) == has_all

    def test_when_scores_are_equal_or_no_numbers_then_experts_are_different_and_the_lower_id_is_first(
        self, device: str, dtype: torch.dtype
    ) -> None:
        router = router_of(8, 4, device, dtype, has_all=False)
        router = replace(router, weight=router.weight[[0, 1, 0, 1, 0, 1, 0, 1]].contiguous())
        x = rows(6, device, dtype)
        x[2, 3] = float("nan")

        actual = route_triton(x, router)

        assert {tuple(row) for row in actual.experts[[0, 1, 3, 4, 5]].tolist()} <= {(0, 2, 4, 6), (1, 3, 5, 7)}
        assert actual.experts[2].tolist() == [0, 1, 2, 3]
        assert bool(actual.shares[2].isnan().all())


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenExpertsInTwoTensors:
    @pytest.mark.parametrize(("num_rows", "is_int8"), grid([0, 1, 5, 90], [False, True], fast=[(5, False), (90, True)]))
    def test_when_rows_are_computed_then_sums_are_those_of_torch(
        self, num_rows: int, is_int8: bool, device: str, dtype: torch.dtype
    ) -> None:
        experts, x = experts_of(5, device, dtype, is_int8=is_int8), rows(num_rows, device, dtype)
        routing = route_triton(x, router_of(5, 2, device, dtype))
        shared = rows(num_rows, device, dtype)

        actual = experts_triton(x, routing, shared, experts=experts)

        outputs, places = grouped_rows(x, routing.experts, experts.each)
        expected = combine_torch(outputs, places, routing, shared)
        torch.testing.assert_close(actual, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])

    def test_when_rows_have_neighbours_then_their_bits_do_not_change(self, device: str, dtype: torch.dtype) -> None:
        experts, x = experts_of(3, device, dtype), rows(70, device, dtype)
        routing = route_triton(x, router_of(3, 2, device, dtype, has_all=False))
        order = torch.randperm(70, generator=torch.Generator().manual_seed(1)).to(device)

        def computed(some: Tensor) -> Tensor:
            part = Routing(routing.experts[some], routing.shares[some], None)
            with matrix_unit():
                return experts_triton(x[some], part, None, experts=experts)

        together = computed(torch.arange(70, device=device))

        assert torch.equal(computed(order), together[order])
        for first, end in ((0, 1), (3, 8), (20, 45)):
            assert torch.equal(computed(torch.arange(first, end, device=device)), together[first:end])
