"""Codes that are packed in words of 32 bits, the first in the lowest bits."""

import torch
from torch import Tensor


def codes_of(words: Tensor, num_bits: int) -> Tensor:
    """Return the codes of `words` `[n, W]` int32, of 4 or 8 bits without a sign: `[n, 32 * W / num_bits]` uint8."""
    unsigned = words.contiguous().view(torch.uint8)
    if num_bits == 8:
        return unsigned
    return torch.stack((unsigned & 15, unsigned >> 4), dim=-1).flatten(1)


def signed(codes: Tensor, num_bits: int) -> Tensor:
    """Return codes, or zeros, as packed weights have them: those of 8 bits less 128, as int8."""
    return codes if num_bits == 4 else (codes ^ 128).view(torch.int8)
