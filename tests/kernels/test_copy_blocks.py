"""Copies of blocks on the CPU, bit by bit, in every layout; and what is refused."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.kernels.copy_blocks import block_runs, copy_blocks
from sluice.kernels.paged_attention import FP8, KVCache
from sluice.kernels.paged_attention.layout import allocate_packed, allocate_plain
from tests.oracles.block_copies import NUM_GUARDS, copies_rightly

NUM_BLOCKS = 9
CPU = torch.device("cpu")
KINDS = ["packed float32", "packed bfloat16", "plain float32", "plain float16", "plain fp8"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": FP8}


def cache_of(kind: str, *, block_size: int = 5, num_kv_heads: int = 3, head_size: int = 24) -> KVCache:
    layout, dtype = kind.split()
    sizes = (NUM_BLOCKS + 2 * NUM_GUARDS, block_size, num_kv_heads, head_size)
    if layout == "packed":
        return allocate_packed(*sizes, dtype=DTYPES[dtype])
    return allocate_plain(*sizes, dtype=DTYPES[dtype], device=CPU)


def copy(caches: Sequence[KVCache], pairs: Sequence[tuple[int, int]]) -> None:
    copy_blocks(block_runs(caches), pairs)


@st.composite
def pairs_of_blocks(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Any sources, to different destinations that are none of them."""
    blocks = draw(st.permutations(range(NUM_BLOCKS)))
    num_destinations = draw(st.integers(0, NUM_BLOCKS - 1))
    sources = st.sampled_from(blocks[num_destinations:])
    return [(draw(sources), destination) for destination in blocks[:num_destinations]]


@pytest.mark.parametrize("kind", KINDS)
class TestGivenCachesOfTwoLayers:
    @settings(max_examples=20, deadline=None)
    @given(pairs=pairs_of_blocks())
    def test_when_blocks_are_copied_then_all_layers_match_and_no_other_block_changes(
        self, kind: str, pairs: list[tuple[int, int]]
    ) -> None:
        assert copies_rightly(copy, [cache_of(kind), cache_of(kind)], pairs)

    @pytest.mark.parametrize(
        ("pairs", "problem"),
        [
            ([(0, 1), (1, 2)], "both source and destination"),
            ([(3, 3)], "both source and destination"),
            ([(0, 2), (1, 2)], "the destination of two"),
            ([(0, NUM_BLOCKS)], "must be in"),
            ([(-1, 0)], "must be in"),
        ],
    )
    def test_when_copies_depend_on_their_order_or_lie_outside_then_none_is_made(
        self, kind: str, pairs: list[tuple[int, int]], problem: str
    ) -> None:
        caches = [cache_of(kind)]
        runs = block_runs([replace(caches[0], num_blocks=NUM_BLOCKS)])
        before = caches[0].keys.clone()

        with pytest.raises(ValueError, match=problem):
            copy_blocks(runs, pairs)

        assert torch.equal(caches[0].keys.view(torch.uint8), before.view(torch.uint8))


class TestGivenCachesThatDoNotFit:
    def test_when_they_have_different_numbers_of_blocks_then_it_says_so(self) -> None:
        cache = cache_of("plain float32")

        with pytest.raises(ValueError, match="equally many blocks"):
            block_runs([cache, replace(cache, num_blocks=3)])

    def test_when_a_block_is_scattered_then_it_says_so(self) -> None:
        cache = cache_of("plain float32")

        with pytest.raises(ValueError, match="contiguous"):
            block_runs([replace(cache, keys=cache.keys[:, :, :, ::2])])
