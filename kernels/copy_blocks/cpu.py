"""Block copies with torch operators: two per part of a layer, for any number of blocks."""

from collections.abc import Sequence

import torch

from sluice.kernels.copy_blocks import BlockRuns, parts_of
from sluice.kernels.paged_attention import FP8


def copy_blocks_cpu(runs: BlockRuns, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy as `sluice.kernels.copy_blocks.copy_blocks`; `pairs` are already checked."""
    on_device = torch.tensor(pairs, dtype=torch.int64).to(runs.table.device)
    sources, destinations = on_device.view(-1, 2).unbind(dim=1)
    for cache in runs.caches:
        for part in parts_of(cache):
            # torch cannot index 8-bit floats.
            bits = part.view(torch.uint8) if part.dtype == FP8 else part
            bits.index_copy_(0, destinations, bits.index_select(0, sources))
