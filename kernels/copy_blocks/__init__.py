"""Copy blocks of the KV cache in all layers at once, for copy-on-write."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check
from sluice.kernels.paged_attention import KVCache

__all__ = ["BlockRuns", "block_runs", "copy_blocks", "parts_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRuns:
    """Addresses of the blocks of all layers. Made once; valid as long as the caches exist."""

    caches: tuple[KVCache, ...]
    table: Tensor
    """`[R, 3]` int64, on the device of the caches: for each part of each layer the address of block 0, the bytes from
    one block to the next, and the bytes of a block, which is contiguous.
    """

    max_bytes: int
    """Bytes of the largest block of any part."""

    alignment: int
    """Divides every number of `table`: 16, or the largest smaller power of 2."""


def parts_of(cache: KVCache) -> list[Tensor]:
    """Return the tensors of a layer's blocks, each `[blocks, ...]`, in any layout: keys, values, and their scales."""
    parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    return [part for part in parts if part is not None]


def block_runs(caches: Sequence[KVCache]) -> BlockRuns:
    """Find the blocks of `caches`: one per layer, of equal sizes, on one device.

    Raises:
        ValueError: their blocks differ, or a block is not contiguous.
    """
    check(len({cache.num_blocks for cache in caches}) == 1, "caches must have equally many blocks")
    parts = [part for cache in caches for part in parts_of(cache)]
    check(all(_is_run(part[0]) for part in parts), "each block must be contiguous")
    rows = [(p.data_ptr(), p.stride(0) * p.element_size(), p[0].numel() * p.element_size()) for p in parts]
    return BlockRuns(
        caches=tuple(caches),
        table=torch.tensor(rows, dtype=torch.int64, device=parts[0].device),
        max_bytes=max(num_bytes for _, _, num_bytes in rows),
        alignment=gcd(16, *(number for row in rows for number in row)),
    )


def copy_blocks(runs: BlockRuns, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks with all their contents: 2·pairs·(bytes of a block in all layers) are moved.

    Args:
        runs: the caches.
        pairs: (source, destination). No block is a destination twice, or both a source and a destination.

    Raises:
        ValueError: a block does not exist, or the result would depend on the order of the copies.
    """
    num_blocks = runs.caches[0].num_blocks
    check(all(0 <= block < num_blocks for pair in pairs for block in pair), "blocks must be in [0, {})", num_blocks)
    destinations = {destination for _, destination in pairs}
    check(len(destinations) == len(pairs), "a block is the destination of two copies")
    check(destinations.isdisjoint(source for source, _ in pairs), "a block is both source and destination")
    if path_of("copy_blocks", runs.table) is Path.TRITON:
        from sluice.kernels.copy_blocks.kernel import copy_blocks_triton

        on_host = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        copy_blocks_triton(runs, on_host.pin_memory().to(runs.table.device, non_blocking=True))
    else:
        from sluice.kernels.copy_blocks.cpu import copy_blocks_cpu

        copy_blocks_cpu(runs, pairs)


def _is_run(block: Tensor) -> bool:
    """Whether the elements of `block` are contiguous, in any order."""
    sizes = [size for _, size in sorted(zip(block.stride(), block.shape, strict=True)) if size > 1]
    strides = sorted(stride for stride, size in zip(block.stride(), block.shape, strict=True) if size > 1)
    return strides == [prod(sizes[:at]) for at in range(len(sizes))]
