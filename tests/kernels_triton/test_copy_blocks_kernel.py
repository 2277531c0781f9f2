"""Copies of blocks by the kernel, bit by bit, between blocks that nothing may touch."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import pytest
import torch

from sluice.kernels.paged_attention import FP8, KVCache
from sluice.kernels.paged_attention.kernel import allocate_cuda
from sluice.kernels.paged_attention.layout import allocate_packed, allocate_plain
from tests.kernels_triton.devices import DEVICES
from tests.oracles.block_copies import NUM_GUARDS, copies_rightly, copy_by_kernel

NUM_BLOCKS = 6


def caches_of(
    num_layers: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: str
) -> list[KVCache]:
    sizes = (NUM_BLOCKS + 2 * NUM_GUARDS, block_size, num_kv_heads, head_size)
    return [allocate_cuda(*sizes, dtype=dtype, device=torch.device(device)) for _ in range(num_layers)]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("is_fp8", [False, True])
class TestGivenCachesOfRandomBits:
    @pytest.mark.parametrize(
        ("num_layers", "block_size", "num_kv_heads", "head_size"),
        # The largest has runs of more than one program; the others units of all widths.
        [(1, 1, 1, 1), (3, 5, 1, 3), (2, 3, 2, 24), (2, 16, 8, 128)],
    )
    @pytest.mark.parametrize("pairs", [[(0, 1), (0, 4), (5, 3)], []])
    def test_when_blocks_are_copied_then_all_layers_match_and_no_other_block_changes(
        self,
        device: str,
        dtype: torch.dtype,
        is_fp8: bool,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        pairs: list[tuple[int, int]],
    ) -> None:
        stored = FP8 if is_fp8 else dtype
        # Attention reads fp8 in pairs, so a cache of it has heads of even sizes.
        head_size = 2 * head_size if is_fp8 else head_size

        caches = caches_of(num_layers, block_size, num_kv_heads, head_size, stored, device)

        assert copies_rightly(copy_by_kernel, caches, pairs)


class TestGivenOtherLayouts:
    """Those of the CPU: the table says where a block lies, the kernel knows nothing of it."""

    def test_when_it_is_packed_then_its_blocks_are_copied_too(self) -> None:
        caches = [allocate_packed(NUM_BLOCKS + 2 * NUM_GUARDS, 5, 3, 24, dtype=torch.bfloat16) for _ in range(2)]

        assert copies_rightly(copy_by_kernel, caches, [(0, 2), (1, 3)])

    def test_when_it_is_plain_and_layers_differ_in_size_then_each_is_copied_whole(self) -> None:
        sizes = (NUM_BLOCKS + 2 * NUM_GUARDS, 4, 2)
        device = torch.device("cpu")
        caches = [allocate_plain(*sizes, head, dtype=FP8, device=device) for head in (8, 40, 1)]

        assert copies_rightly(copy_by_kernel, caches, [(0, 2), (1, 3)])


class TestGivenAPoolOfMoreThanTwoToThe31Bytes:
    def test_when_a_block_lies_beyond_then_its_address_does_not_wrap(self) -> None:
        # Pages that are never written take no memory.
        cache = allocate_plain(2**31 // 4096 + 4, 1, 8, 128, dtype=torch.float32, device=torch.device("cpu"))
        source, destination = cache.num_blocks - 1, 3
        cache.keys[source], cache.values[source] = 1.5, -2.5

        copy_by_kernel([cache], [(source, destination), (2, cache.num_blocks - 2)])

        assert (cache.keys[destination] == 1.5).all()
        assert (cache.values[destination] == -2.5).all()
        assert float(cache.keys[:2].abs().sum() + cache.keys[4:6].abs().sum()) == 0.0
