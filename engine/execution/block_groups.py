"""Groups of layers that have a block table each, for models in which only some layers have a sliding window.

Blocks of the layers with a window are given back once they left it, while those of the other layers are kept. All
blocks are alike and come from one pool: a block holds the tokens of as many layers as a group has (the hybrid KV cache
of Jenga, Zhang et al., SOSP 2025, and of vLLM). So the memory goes to whichever layers need it, and layers of
different groups share their tensors.
"""

from collections.abc import Sequence
from typing import NamedTuple

MAX_WINDOW_GROUPS = 8
"""Each group is one more block table that a step sends."""

_WINDOWS = 4
"""Length, in windows, of the sequence for which the number of groups is chosen."""


class LayerPlace(NamedTuple):
    """Where a layer finds its keys and values."""

    table: int
    """Its block table: 0 is that of the layers that attend to all tokens."""

    part: int
    """Its part of a block."""


class BlockGroups(NamedTuple):
    """The places of all layers."""

    places: tuple[LayerPlace, ...]
    layers_per_block: int
    """Parts of a block. In the last group of a table, some may be unused."""

    @property
    def num_window_groups(self) -> int:
        """Groups of layers with a window, besides the one that attends to all tokens; 0: all layers are one group."""
        return max(place.table for place in self.places)


def block_groups(sliding_windows: Sequence[int]) -> BlockGroups:
    """Return the groups of layers with these windows (0: none).

    All layers are one group unless at least half of them, but not all, have a window, all the same one. The number of
    groups is the one with which a sequence of `_WINDOWS` windows takes the least memory, unused parts included.
    """
    windows = [window for window in sliding_windows if window]
    num_full = len(sliding_windows) - len(windows)
    if not 0 < num_full <= len(windows) or len(set(windows)) > 1:
        return BlockGroups(tuple(LayerPlace(0, part) for part in range(len(sliding_windows))), len(sliding_windows))
    sizes = {groups: max(num_full, -(-len(windows) // groups)) for groups in range(1, MAX_WINDOW_GROUPS + 1)}
    size = sizes[min(sizes, key=lambda groups: ((_WINDOWS + groups) * sizes[groups], groups))]
    numbers = {0: iter(range(num_full)), 1: iter(range(size, size + len(windows)))}
    places = (divmod(next(numbers[bool(window)]), size) for window in sliding_windows)
    return BlockGroups(tuple(LayerPlace(*place) for place in places), size)
