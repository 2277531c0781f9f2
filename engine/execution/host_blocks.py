"""Memory of the host tier: blocks of the KV cache outside the device, in the order of the device's streams."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sluice.engine.batch import BlockCopy, BlockSave
from sluice.engine.errors import NotEnoughMemory
from sluice.engine.execution.transfers import to_device
from sluice.kernels.copy_blocks import parts_of
from sluice.kernels.paged_attention import FP8, KVCache


class HostBlocks:
    """Blocks outside the device, all layers of each. Mutable.

    Copies from and to a GPU are queued behind the steps that were launched before, and nothing waits for them. For each
    part of a layer a step has one gather or scatter on the device, however many blocks it moves, and one copy for each
    run of blocks that lie side by side in host memory.
    """

    def __init__(self, caches: Iterable[KVCache], num_blocks: int) -> None:
        """Allocate `num_blocks` blocks; pinned memory if the caches are on a GPU.

        Raises:
            NotEnoughMemory: the machine lacks the memory.
        """
        parts = [_bits(part) for cache in caches for part in parts_of(cache)] if num_blocks else []
        try:
            self._parts = [(part, _like_on_host(part, num_blocks)) for part in parts]
        except RuntimeError as error:
            raise NotEnoughMemory(
                f"{num_blocks} blocks of the host tier cannot be allocated: {error}. Allow it less memory."
            ) from error
        self._last_save = 0

    def save(self, saves: Iterable[BlockSave]) -> None:
        """Make those of `saves` that were not made before."""
        new = [save for save in saves if save.number > self._last_save]
        if not new:
            return
        sources = self._on_device([save.source for save in new])
        runs = list(_runs([save.destination for save in new]))
        for on_device, on_host in self._parts:
            gathered = on_device.index_select(0, sources)
            for at, first, length in runs:
                on_host[first : first + length].copy_(gathered[at : at + length], non_blocking=True)
        self._last_save = new[-1].number

    def load(self, loads: Sequence[BlockCopy]) -> None:
        """Make `loads`; repeating them changes nothing."""
        if not loads:
            return
        destinations = self._on_device([load.destination for load in loads])
        runs = list(_runs([load.source for load in loads]))
        for on_device, on_host in self._parts:
            gathered = on_device.new_empty((len(loads), *on_device.shape[1:]))
            for at, first, length in runs:
                gathered[at : at + length].copy_(on_host[first : first + length], non_blocking=True)
            on_device.index_copy_(0, destinations, gathered)

    def _on_device(self, blocks: list[int]) -> Tensor:
        return to_device(np.array(blocks, dtype=np.int64), self._parts[0][0].device)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield where in `blocks` each run of ascending neighbours begins, its first block, and its length."""
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            yield start, blocks[start], at - start
            start = at


def _bits(part: Tensor) -> Tensor:
    """Return a part of which torch can select blocks: it cannot of 8-bit floats."""
    return part.view(torch.uint8) if part.dtype == FP8 else part


def _like_on_host(part: Tensor, num_blocks: int) -> Tensor:
    shape = (num_blocks, *part.shape[1:])
    return torch.empty(shape, dtype=part.dtype, pin_memory=part.device.type == "cuda")
