"""Definition of copying blocks: one block, one part of one layer at a time."""

from collections.abc import Sequence

from sluice.kernels.copy_blocks import parts_of
from sluice.kernels.paged_attention import KVCache


def copy_blocks_reference(caches: Sequence[KVCache], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy each source to its destination, in every layer."""
    for source, destination in pairs:
        for cache in caches:
            for part in parts_of(cache):
                part[destination] = part[source].clone()
