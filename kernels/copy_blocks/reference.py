"""What copying blocks means: one block, one part of one layer at a time."""

from collections.abc import Sequence

from kernels.copy_blocks import parts_of
from kernels.paged_attention import KVCache


def copy_blocks_reference(caches: Sequence[KVCache], pairs: Sequence[tuple[int, int]]) -> None:
    """Let each destination hold what its source holds, in every layer."""
    for source, destination in pairs:
        for cache in caches:
            for part in parts_of(cache):
                part[destination] = part[source].clone()
