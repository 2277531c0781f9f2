"""Counter-based random bits (Philox4x32-10: Salmon et al., SC 2011), and the Gumbel noise made of them.

A number is a function of what it is for, never of when or where it is drawn:

- key: the request's 64-bit seed (k0 its low, k1 its high word)
- c0: token id >> 2; the lane is token id & 3
- c1: the token's offset in the output (0 for the first that is generated), so that a resumed output goes on equally
- c2: choice << 2 | stream
- c3: NOISE_VERSION
"""

from enum import IntEnum

__all__ = ["NOISE_VERSION", "Stream", "counter_2"]

NOISE_VERSION = 1
"""Raised when the same key would give other noise: a model's fingerprint contains it."""


class Stream(IntEnum):
    """What the noise is for; streams are independent of each other."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def counter_2(choice: int, stream: Stream = Stream.SAMPLE) -> int:
    """The third counter word, of a choice's index and a stream."""
    return choice << 2 | stream
