"""Caches of random bits, and a check of block copies: for tests and `benchmarks gpu`."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sluice.kernels.copy_blocks import block_runs, parts_of
from sluice.kernels.copy_blocks.reference import copy_blocks_reference
from sluice.kernels.paged_attention import KVCache
from tests.oracles.kernel_cases import same_bits

NUM_GUARDS = 2
"""Guard blocks before and behind a cache."""

Copy = Callable[[Sequence[KVCache], Sequence[tuple[int, int]]], None]


def copies_rightly(copy: Copy, caches: Sequence[KVCache], pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether `copy`, applied to the middle blocks of `caches`, leaves every bit as the reference does.

    The caches are filled with random bits: numbers, NaN and infinities of all kinds.
    """
    for index, cache in enumerate(caches):
        _fill(cache, seed=index)
    expected = [_clone(cache) for cache in caches]
    copy_blocks_reference([_middle(cache) for cache in expected], pairs)
    copy([_middle(cache) for cache in caches], pairs)
    return all(
        same_bits(mine.reshape(-1), theirs.reshape(-1))
        for cache, other in zip(caches, expected, strict=True)
        for mine, theirs in zip(parts_of(cache), parts_of(other), strict=True)
    )


def copy_by_kernel(caches: Sequence[KVCache], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy with the Triton kernel, on any device."""
    from sluice.kernels.copy_blocks.kernel import copy_blocks_triton

    runs = block_runs(caches)
    copy_blocks_triton(runs, on_device(pairs, runs.table.device))


def on_device(pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return `pairs` as the kernel reads them, `[P, 2]` int64."""
    return torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2)


def _fill(cache: KVCache, *, seed: int) -> None:
    generator = torch.Generator(cache.keys.device).manual_seed(seed)
    for part in parts_of(cache):
        shape = (*part.shape[:-1], part.shape[-1] * part.element_size())
        bits = torch.randint(0, 256, shape, dtype=torch.uint8, device=part.device, generator=generator)
        part.copy_(bits.view(part.dtype))


def _middle(cache: KVCache) -> KVCache:
    """Return all blocks but the guards, in the same memory."""
    num_blocks = cache.num_blocks - 2 * NUM_GUARDS
    return _with_parts(replace(cache, num_blocks=num_blocks), lambda part: part[NUM_GUARDS : NUM_GUARDS + num_blocks])


def _clone(cache: KVCache) -> KVCache:
    return _with_parts(cache, torch.clone)


def _with_parts(cache: KVCache, change: Callable[[Tensor], Tensor]) -> KVCache:
    return replace(
        cache,
        keys=change(cache.keys),
        values=change(cache.values),
        key_scales=None if cache.key_scales is None else change(cache.key_scales),
        value_scales=None if cache.value_scales is None else change(cache.value_scales),
    )
