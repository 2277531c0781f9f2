"""What judges the kernels: it must find what is wrong, and let pass what is merely rounded."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import pytest
import torch

from tests.oracles.kernel_cases import Agreement, agreement, kept_set_differs, make_options, same_bits

EXPECTED = torch.linspace(-3, 3, 1001, dtype=torch.float64)


class TestGivenAResult:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_when_it_is_rounded_once_then_it_agrees(self, dtype: torch.dtype) -> None:
        assert agreement(EXPECTED.to(dtype), EXPECTED, 0.0).holds

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_when_one_element_is_off_by_a_few_units_then_it_does_not(self, dtype: torch.dtype) -> None:
        actual = EXPECTED.to(dtype)
        actual[700] *= 1 + 8 * torch.finfo(dtype).eps

        assert not agreement(actual, EXPECTED, 0.0).holds

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_when_one_element_is_not_finite_then_it_does_not(self, value: float) -> None:
        actual = EXPECTED.float()
        actual[3] = value

        assert not agreement(actual, EXPECTED, 1.0).holds

    def test_when_every_element_leans_one_way_within_its_slack_then_it_does_not(self) -> None:
        assert not agreement((EXPECTED * 1.001).float(), EXPECTED, 0.01).holds

    def test_when_one_of_many_is_wrong_then_the_worse_counts(self) -> None:
        nan = Agreement(float("nan"), 0.0)

        assert not Agreement(0.1, 0.0).and_also(nan).holds
        assert not nan.and_also(Agreement(0.1, 0.0)).holds
        assert Agreement(0.1, 0.0).and_also(Agreement(0.9, 0.0)).worst == 0.9


class TestGivenBits:
    def test_when_they_are_compared_then_nan_equals_nan_and_minus_zero_is_not_zero(self) -> None:
        assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
        assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


class TestGivenAKeptSet:
    def test_when_a_token_is_missing_or_too_many_then_it_says_so(self) -> None:
        logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
        options = make_options([{"top_k": 2}], "cpu")

        assert kept_set_differs(logits, options, 0, torch.tensor([True, False, True, False])) is None
        assert kept_set_differs(logits, options, 0, torch.tensor([True, False, False, False])) is not None
        assert kept_set_differs(logits, options, 0, torch.tensor([True, True, True, False])) is not None
