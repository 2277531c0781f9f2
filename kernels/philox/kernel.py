# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Philox4x32-10 and its Gumbel noise as Triton device functions. Words are bitwise identical to the reference's."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.philox import NOISE_VERSION

_VERSION = tl.constexpr(NOISE_VERSION)


@triton.jit
def random_words(groups, seed, position, counter_2):
    """Return four random uint32 words per group of four token ids: lane i is token `4 * group + i`.

    Args:
        groups: int32, `token_id >> 2`.
        seed: int64 scalar, the bits of the unsigned seed.
        position: int32 scalar.
        counter_2: int32 scalar.
    """
    # Every counter must be 32 bits wide: with a wider one `tl.philox` silently is a different generator.
    zeros = groups.to(tl.uint32) * 0
    version = zeros + _VERSION
    return tl.philox(
        seed, groups.to(tl.uint32), zeros + position.to(tl.uint32), zeros + counter_2.to(tl.uint32), version
    )


@triton.jit
def gumbel(word):
    """Return Gumbel noise -log(-log(1 - v)), v = (word + 1/2) / 2**32, of a uint32 word, float32 and finite.

    -log(1 - v) is computed accurately: by its series for small v (the likely winners), else from 1 - v, computed from
    the word's complement since float32 cannot represent v near 1.
    """
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((4294967295 - word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6 + v * (1 / 7)))))))
    # At most the largest float32 below 1 in v: the remainder is never 0.
    exponential = tl.where(v < 0.0625, series, -tl.log(tl.maximum(rest, 5.9604644775390625e-08)))
    return -tl.log(exponential)


@triton.jit
def _random_words_kernel(words_ptr, noise_ptr, V, seed_ptr, position_ptr, counter_2_ptr, BLOCK: tl.constexpr):
    """One program per BLOCK groups of four token ids: their words and their noise, in order."""
    groups = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    seed, position, counter_2 = tl.load(seed_ptr), tl.load(position_ptr), tl.load(counter_2_ptr)
    words = random_words(groups, seed, position, counter_2)
    for lane in tl.static_range(4):
        token_ids = groups * 4 + lane
        tl.store(words_ptr + token_ids, words[lane].to(tl.int64), mask=token_ids < V)
        tl.store(noise_ptr + token_ids, gumbel(words[lane]), mask=token_ids < V)


def random_words_triton(num_tokens: int, seed: Tensor, position: Tensor, counter_2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the words `[V]` int64 of token ids 0 … V - 1 and their Gumbel noise `[V]` float32, for tests.

    Args:
        num_tokens: V.
        seed: `[1]` int64.
        position: `[1]` int32.
        counter_2: `[1]` int32.
    """
    words = torch.empty(num_tokens, dtype=torch.int64, device=seed.device)
    noise = torch.empty(num_tokens, dtype=torch.float32, device=seed.device)
    grid = (triton.cdiv(num_tokens, 4 * 256),)
    _random_words_kernel[grid](words, noise, num_tokens, seed, position, counter_2, BLOCK=256)
    return words, noise
