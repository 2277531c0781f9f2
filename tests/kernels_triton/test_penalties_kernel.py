"""Penalties against float64: the logits of seen tokens change, and no others."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from dataclasses import replace

import pytest
import torch

from sluice.kernels.penalties.cpu import apply_penalties_torch
from sluice.kernels.penalties.kernel import BLOCK, apply_penalties_triton
from tests.kernels_triton.devices import DEVICES
from tests.oracles.kernel_cases import generator_on, make_penalties, penalties_agreement, random_tensor, same_bits


@pytest.mark.parametrize(("device", "dtype"), [DEVICES[0], DEVICES[2]])
class TestGivenLogits:
    @pytest.mark.parametrize(
        ("num_rows", "vocab_size", "per_row"), [(1, 1, 1), (3, 300, 7), (2, BLOCK + 3, BLOCK), (5, 60, 60), (2, 500, 0)]
    )
    def test_when_tokens_are_penalised_then_they_agree_and_nothing_else_is_touched(
        self, device: str, dtype: torch.dtype, num_rows: int, vocab_size: int, per_row: int
    ) -> None:
        generator = generator_on(device)
        # Rows of a wider buffer: what lies next to them must stay NaN.
        wide = random_tensor(num_rows, vocab_size + 3, dtype=dtype, generator=generator, spread=3)
        wide[:, vocab_size:] = float("nan")
        logits = wide[:, :vocab_size].clone()
        penalties = make_penalties(num_rows, vocab_size, per_row, generator)

        apply_penalties_triton(wide[:, :vocab_size], penalties)

        assert penalties_agreement(wide[:, :vocab_size], logits, penalties).holds
        assert wide[:, vocab_size:].isnan().all()

    def test_when_logits_are_banned_or_zero_then_both_paths_have_the_same_bits(
        self, device: str, dtype: torch.dtype
    ) -> None:
        logits = random_tensor(2, 50, dtype=dtype, generator=generator_on(device))
        logits[:, ::7] = float("-inf")
        logits[:, 3], logits[:, 4] = 0.0, -0.0
        penalties = make_penalties(2, 50, 50, generator_on(device, seed=1))
        expected = logits.clone()

        apply_penalties_triton(logits, penalties)

        apply_penalties_torch(expected, penalties)
        assert same_bits(logits, expected)

    def test_when_a_row_has_no_penalties_then_every_bit_stays(self, device: str, dtype: torch.dtype) -> None:
        logits = random_tensor(2, 50, dtype=dtype, generator=generator_on(device))
        penalties = make_penalties(2, 50, 50, generator_on(device))
        before = logits.clone()

        apply_penalties_triton(logits, replace(penalties, places=torch.full_like(penalties.places, -1)))

        assert same_bits(logits, before)
