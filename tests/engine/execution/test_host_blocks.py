"""Blocks copied to host memory and back, in every layout of the cache."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sluice.engine.batch import BlockCopy, BlockSave
from sluice.engine.execution.host_blocks import HostBlocks
from sluice.kernels.copy_blocks import parts_of
from sluice.kernels.paged_attention import FP8, KVCache
from sluice.kernels.paged_attention.kernel import allocate_cuda
from sluice.kernels.paged_attention.layout import allocate_packed, allocate_plain

CPU = torch.device("cpu")
Make = Callable[[], KVCache]
CACHES: dict[str, Make] = {
    "packed": lambda: allocate_packed(12, 8, 2, 16, dtype=torch.bfloat16),
    "plain, fp8": lambda: allocate_plain(12, 8, 2, 16, dtype=FP8, device=CPU),
    "as on a GPU": lambda: allocate_cuda(12, 8, 2, 16, dtype=torch.float16, device=CPU),
}


def filled(cache: KVCache) -> KVCache:
    """The cache, with bytes that differ from block to block."""
    for part in parts_of(cache):
        bits = part.view(torch.uint8)
        bits.copy_(torch.randint(0, 255, bits.shape, dtype=torch.uint8))
    return cache


def block_of(cache: KVCache, block: int) -> list[torch.Tensor]:
    """A copy of the bytes of a block."""
    return [part[block].view(torch.uint8).clone() for part in parts_of(cache)]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Copies(TorchDispatchMode):
    """Counts copies from one memory to another, and gathers and scatters of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = self.num_moves = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's own
        name: str = func.overloadpacket.__name__
        self.num_copies += name == "copy_"
        self.num_moves += name in ("index_select", "index_copy_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
class TestGivenBlocksOfTwoLayers:
    def test_when_they_are_saved_and_loaded_into_others_then_these_have_their_contents(self, make: Make) -> None:
        caches = [filled(make()), filled(make())]
        host = HostBlocks(caches, 6)
        before = [[block_of(cache, block) for cache in caches] for block in (3, 1, 7)]

        host.save([BlockSave(1, 3, 4), BlockSave(2, 1, 5), BlockSave(3, 7, 0)])
        host.load([BlockCopy(9, 0, 2), BlockCopy(9, 5, 3), BlockCopy(9, 4, 11)])

        for contents, destination in zip(before, (11, 3, 2), strict=True):
            assert all(
                are_equal(block_of(cache, destination), expected)
                for cache, expected in zip(caches, contents, strict=True)
            )

    def test_when_a_save_is_repeated_then_it_is_not_made_again(self, make: Make) -> None:
        caches = [filled(make())]
        host = HostBlocks(caches, 6)
        before = block_of(caches[0], 2)
        host.save([BlockSave(1, 2, 0)])
        filled(caches[0])

        host.save([BlockSave(1, 2, 0), BlockSave(2, 5, 1)])
        host.load([BlockCopy(9, 0, 7)])

        assert are_equal(block_of(caches[0], 7), before)

    def test_when_host_blocks_lie_side_by_side_then_each_part_is_copied_at_once(self, make: Make) -> None:
        caches = [filled(make()), filled(make())]
        num_parts = sum(len(parts_of(cache)) for cache in caches)
        host = HostBlocks(caches, 8)

        with Copies() as copies:
            host.save([BlockSave(n + 1, 9 - n, n) for n in range(6)])
            host.load([BlockCopy(1, n, 11 - n) for n in range(6)])

        assert copies.num_copies == 2 * num_parts
        assert copies.num_moves == 2 * num_parts
