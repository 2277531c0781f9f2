"""Copies and log-probabilities of rows of logits on the CPU: native paths against their definitions."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.kernels.float_rows import float_rows
from sluice.kernels.logprobs import logprobs
from sluice.kernels.logprobs.reference import logprobs_reference

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 15, 16, 100, 5000]


def some_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Strided rows with equal numbers, and tokens that are banned."""
    wide = torch.randn(num_rows, vocab_size + 3, generator=torch.Generator().manual_seed(seed)) * 8
    logits = wide.to(dtype)[:, :vocab_size]
    logits[:, 5::7] = -math.inf
    logits[:, 3::11] = 1.0
    return logits


def check_equals_definition(logits: torch.Tensor, rows: torch.Tensor, count: int) -> None:
    """Compare with the definition, for a token of each row that is not banned."""
    token_ids = torch.arange(len(rows)) % min(3, logits.shape[1])
    chosen, values, ids = logprobs(logits, token_ids, count=count, rows=rows)
    wide = logits.index_select(0, rows).float()
    expected_chosen, expected_values, expected_ids = logprobs_reference(wide, token_ids, count=count)
    torch.testing.assert_close(chosen.double(), expected_chosen, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(values.double(), expected_values, rtol=1e-6, atol=2e-6)
    assert torch.equal(ids, expected_ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", SIZES)
class TestGivenRowsOfLogits:
    def test_when_some_are_copied_then_their_values_are_the_same(self, vocab_size: int, dtype: torch.dtype) -> None:
        logits, rows = some_logits(7, vocab_size, dtype), torch.tensor([6, 0, 3])

        copies = float_rows(logits, rows)

        assert copies.dtype == torch.float32
        assert torch.equal(copies, logits[rows].float())

    def test_when_log_probabilities_are_asked_for_then_they_equal_the_definition(
        self, vocab_size: int, dtype: torch.dtype
    ) -> None:
        logits, rows = some_logits(7, vocab_size, dtype), torch.tensor([6, 0, 3, 4, 5])
        for count in sorted({0, 1, min(5, vocab_size), min(120, vocab_size), vocab_size}):
            check_equals_definition(logits, rows, count)


class TestGivenManyRows:
    @settings(max_examples=20, deadline=None)
    @given(seed=st.integers(0, 10**6), num_rows=st.integers(2, 20))
    def test_when_one_is_computed_alone_then_its_bits_are_the_same(self, seed: int, num_rows: int) -> None:
        logits = some_logits(num_rows, 3000, torch.bfloat16, seed)
        token_ids = torch.arange(num_rows)

        together = logprobs(logits, token_ids, count=7)

        for row in range(num_rows):
            alone = logprobs(logits, token_ids[row : row + 1], count=7, rows=torch.tensor([row]))
            assert all(torch.equal(one, whole[row : row + 1]) for one, whole in zip(alone, together, strict=True))


class TestGivenARowThatIsNotFinite:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_when_rows_are_measured_then_the_others_are_right(self, bad: float) -> None:
        logits = some_logits(3, 200, torch.float32)
        logits[1, 50] = bad

        chosen, values, ids = logprobs(logits, torch.zeros(3, dtype=torch.int64), count=4)

        assert chosen[1].isnan().all()
        assert values[1].isnan().all()
        assert ((ids >= 0) & (ids < 200)).all()
        check_equals_definition(logits, torch.tensor([0, 2]), 4)

    def test_when_no_token_is_above_minus_infinity_then_its_results_are_not_numbers(self) -> None:
        chosen, values, _ = logprobs(torch.full((1, 40), -math.inf), torch.tensor([2]), count=3)

        assert chosen.isnan().all()
        assert values.isnan().all()
