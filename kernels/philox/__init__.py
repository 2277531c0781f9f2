"""Counter-based random bits (Philox4x32-10: Salmon et al., SC 2011), and Gumbel noise made from them.

A number depends on its purpose, never on when or where it is drawn:

- key: the request's 64-bit seed (k0 its low, k1 its high word)
- c0: token id >> 2; the lane is token id & 3
- c1: the token's offset in the output (0 for the first generated token), so that a resumed output continues identically
- c2: choice << 2; the low two bits are for noise with other purposes than sampling, and 0
- c3: NOISE_VERSION
"""

__all__ = ["NOISE_VERSION", "counter_2"]

NOISE_VERSION = 1
"""Raised when the same key would give different noise: a model's fingerprint contains it."""


def counter_2(choice: int) -> int:
    """Return the third counter word of a choice's index."""
    return choice << 2
