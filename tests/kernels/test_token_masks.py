"""Masks on the CPU and by operators, and a loop over their bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.kernels.token_masks import apply_token_masks
from sluice.kernels.token_masks.reference import apply_token_masks_reference


class TestGivenRowsWithMasks:
    @given(vocab_size=st.integers(1, 100), num_rows=st.integers(1, 5), seed=st.integers(0, 2**32 - 1), data=st.data())
    def test_when_they_are_applied_then_only_tokens_with_a_bit_keep_their_logits(
        self, vocab_size: int, num_rows: int, seed: int, data: st.DataObject
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
        # Rows of a wider buffer: what lies next to them must stay.
        logits = torch.randn(num_rows, vocab_size + 3, generator=generator).to(dtype)
        rows = sorted(data.draw(st.sets(st.integers(0, num_rows - 1), min_size=1)))
        masks = torch.randint(-(2**31), 2**31, (len(rows), -(-vocab_size // 32)), generator=generator).int()
        masks[0, 0] = data.draw(st.sampled_from([0, -1, 5]))
        on_cpu, by_operators = logits.clone(), logits.clone()

        apply_token_masks(on_cpu[:, :vocab_size], torch.tensor(rows), masks)
        apply_token_masks_reference(by_operators[:, :vocab_size], torch.tensor(rows), masks)

        expected = logits.clone()
        for row, mask in zip(rows, masks.numpy(), strict=True):
            for token in range(vocab_size):
                if not int(mask[token // 32]) >> (token % 32) & 1:
                    expected[row, token] = -torch.inf
        assert torch.equal(on_cpu, expected)
        assert torch.equal(by_operators, expected)

    def test_when_there_are_many_rows_then_threads_share_them(self) -> None:
        logits = torch.randn(40, 40_000).bfloat16()
        rows = torch.arange(1, 40, 2)
        masks = torch.randint(-(2**31), 2**31, (20, 1250)).int()
        expected = logits.clone()
        apply_token_masks_reference(expected, rows, masks)

        apply_token_masks(logits, rows, masks)

        assert torch.equal(logits, expected)

    def test_when_a_mask_is_too_short_then_it_is_refused(self) -> None:
        with pytest.raises(ValueError, match="masks"):
            apply_token_masks(torch.zeros(1, 33), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32))
