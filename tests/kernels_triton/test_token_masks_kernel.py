"""Masks against the definition: banned tokens are -inf, and nothing else is touched."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import pytest
import torch

from sluice.kernels.token_masks.kernel import BLOCK, apply_token_masks_triton
from sluice.kernels.token_masks.reference import apply_token_masks_reference
from tests.kernels_triton.devices import DEVICES
from tests.oracles.kernel_cases import generator_on, random_tensor, same_bits


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
class TestGivenLogits:
    @pytest.mark.parametrize(
        ("vocab_size", "rows"), [(1, [0]), (31, [2, 0]), (32, []), (BLOCK + 33, [1]), (300, [0, 2])]
    )
    def test_when_rows_have_masks_then_only_their_banned_tokens_change(
        self, device: str, dtype: torch.dtype, vocab_size: int, rows: list[int]
    ) -> None:
        generator = generator_on(device)
        # Rows of a wider buffer: what lies next to them must stay NaN.
        wide = random_tensor(3, vocab_size + 3, dtype=dtype, generator=generator)
        wide[:, vocab_size:] = float("nan")
        words = -(-vocab_size // 32)
        masks = torch.randint(-(2**31), 2**31, (len(rows), words), generator=generator, device=device).int()
        masks[:1, 0] = 0
        at = torch.tensor(rows, dtype=torch.int64, device=device)
        expected = wide.clone()
        apply_token_masks_reference(expected[:, :vocab_size], at, masks)

        apply_token_masks_triton(wide[:, :vocab_size], at, masks)

        assert same_bits(wide, expected)
