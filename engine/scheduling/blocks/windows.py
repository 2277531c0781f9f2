"""Which entries of the block tables a sequence holds: those of all its tokens, or those in a sliding window.

A group is the tables whose layers attend alike: blocks of one entry of them are found and given back together. A model
without windows, or with one in every layer, has one table and one group. One in which only some layers have a window
has two groups: the table of the layers that attend to all tokens, and those of the window groups.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sluice.engine.executor import blocks_needed, window_entries
from sluice.engine.scheduling.blocks.prefix_index import Entry, PrefixIndex

_ANY = 0
"""In a block table, a block before the sliding window."""


class WindowSizes(NamedTuple):
    """The sliding window of a model, and the blocks that a sequence holds because of it."""

    num_tokens: int
    """Tokens that a token attends to."""

    step_tokens: int
    """Maximum tokens of a step."""

    num_groups: int = 0
    """Window groups; 0: all layers have the window, and one table."""


@dataclass(frozen=True, slots=True)
class TableGroup:
    """Tables whose layers attend to all tokens: a sequence holds a block for every entry."""

    number: int
    """In the prefix index."""

    tables: slice
    """Those of a sequence that belong to it."""

    num_tables: int

    block_size: int

    def num_entries(self, num_tokens: int, num_cached_tokens: int) -> int:
        """Return how many entries a sequence that joins needs for `num_tokens`, the first of which are cached."""
        return blocks_needed(num_tokens, self.block_size)

    def num_passed(self, num_computed_tokens: int) -> int:
        """Return how many leading entries the token after the computed ones, and all later ones, do not attend to."""
        return 0

    def cached(self, keys: list[int], index: PrefixIndex) -> list[Entry]:
        """Return the entries of the longest prefix of `keys` that `index` has, as far as its end attends to them."""
        return index.leading(keys, self.number)


@dataclass(frozen=True, slots=True)
class WindowedGroup(TableGroup):
    """Tables whose layers have a sliding window: a sequence holds the blocks of one window and one step.

    Later steps give back as many as they take. Tables keep an entry for blocks that left the window, which nothing
    reads.
    """

    sizes: WindowSizes

    def num_entries(self, num_tokens: int, num_cached_tokens: int) -> int:
        """See `TableGroup.num_entries`."""
        most = window_entries(self.sizes.num_tokens, self.sizes.step_tokens, self.block_size)
        return min(blocks_needed(num_tokens, self.block_size), self.num_passed(num_cached_tokens) + most)

    def num_passed(self, num_computed_tokens: int) -> int:
        """See `TableGroup.num_passed`."""
        return max(0, num_computed_tokens - self.sizes.num_tokens + 1) // self.block_size

    def cached(self, keys: list[int], index: PrefixIndex) -> list[Entry]:
        """See `TableGroup.cached`."""
        num_cached = num_checked = len(keys)
        while num_checked > (num_passed := self.num_passed(num_cached * self.block_size)):
            num_checked -= 1
            if index.find(keys[num_checked], self.number) is None:
                num_cached = num_checked
        passed: list[Entry] = [(_ANY,) * self.num_tables] * num_passed
        return passed + index.leading(keys[num_passed:num_cached], self.number)


class TableGroups:
    """The groups of a model's block tables. Of the last, a sequence holds the fewest entries."""

    def __init__(self, block_size: int, window: WindowSizes | None) -> None:
        if window is None:
            self._groups = (TableGroup(0, slice(1), 1, block_size),)
        elif not window.num_groups:
            self._groups = (WindowedGroup(0, slice(1), 1, block_size, window),)
        else:
            windowed = WindowedGroup(1, slice(1, None), window.num_groups, block_size, window)
            self._groups = (TableGroup(0, slice(1), 1, block_size), windowed)
        self.has_window = window is not None
        self.num_tables = sum(group.num_tables for group in self._groups)
        self.tables = tuple(group.tables for group in self._groups)
        """Of each group: which of a sequence's tables belong to it."""

        self.num_passed = self._groups[-1].num_passed
        """See `TableGroup.num_passed`; of the last group."""

    def lengths(self, num_tokens: int, num_cached_tokens: int) -> list[int]:
        """Return how many entries each table of a sequence that joins has; see `TableGroup.num_entries`."""
        return [
            group.num_entries(num_tokens, num_cached_tokens) for group in self._groups for _ in range(group.num_tables)
        ]

    def cached(self, keys: list[int], index: PrefixIndex) -> list[list[int]]:
        """Return tables of one length for the longest prefix of `keys` that `index` has; see `TableGroup.cached`."""
        entries_of_groups: list[list[Entry]] = []
        for group in self._groups:
            entries = group.cached(keys, index)
            entries_of_groups.append(entries)
            keys = keys[: len(entries)]
        return [
            [entry[place] for entry in entries[: len(keys)]]
            for group, entries in zip(self._groups, entries_of_groups, strict=True)
            for place in range(group.num_tables)
        ]
