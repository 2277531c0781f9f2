"""Philox4x32-10 and its Gumbel noise in torch integers: the definition for every device."""

import torch
from torch import Tensor

from sluice.kernels.philox import NOISE_VERSION

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MAX_V = 1.0 - 2.0**-24
"""float32 rounds the largest uniforms to 1, whose Gumbel would be infinite."""


def philox4x32_reference(
    counters: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words per counter. All tensors int64, broadcastable, values below 2**32."""
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(10):
        high_0, low_0 = _multiply(_MULTIPLIERS[0], c0)
        high_1, low_1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def random_words_reference(token_ids: Tensor, *, seed: int, position: int, counter_2: int) -> Tensor:
    """Return the random 32-bit word of each token id, int64, shape of `token_ids` (int64).

    Args:
        token_ids: any shape.
        seed: unsigned 64-bit.
        position: offset in the output of the token being sampled.
        counter_2: choice and stream, from `sluice.kernels.philox.counter_2`.
    """
    constants = torch.tensor([position, counter_2, NOISE_VERSION, seed & _MASK, seed >> 32], device=token_ids.device)
    c1, c2, c3, k0, k1 = constants.unbind()
    words = torch.stack(philox4x32_reference((token_ids >> 2, c1, c2, c3), (k0, k1)))  # [4, ...]
    return words.gather(0, (token_ids & 3).unsqueeze(0)).squeeze(0)


def gumbel_reference(words: Tensor) -> Tensor:
    """Return Gumbel noise `-log(-log(1 - v))`, `v = (word + 1/2) / 2**32`, float32; every value is finite.

    Its range is [-2.82, 22.88]: a token that is further than its width below the largest logit can never win.
    """
    v = ((words.double() + 0.5) * 2.0**-32).clamp(max=_MAX_V)
    return (-torch.log(-torch.log1p(-v))).float()


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low word of a 32-bit by 32-bit product: int64 wraps, but its bits are correct."""
    product = a * b
    return (product >> 32) & _MASK, product & _MASK
