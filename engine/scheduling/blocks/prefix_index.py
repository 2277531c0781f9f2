"""Prefix cache: full computed blocks, found by the hash of their tokens and of everything before them.

The hash (`sequence.block_hash`) is chained over the blocks and begins with the sequence's cache salt (vLLM, SOSP 2023,
and its later prefix cache).
"""

from collections.abc import Iterable
from itertools import takewhile

Entry = tuple[int, ...]
"""The blocks of one entry of the tables of a group: they have the keys and values of the same tokens."""


class PrefixIndex:
    """Which blocks have the contents of a hash, for the tables of each group. Mutable.

    A block may be held or free; it stays in the index until it is taken for new contents. Two entries may have the same
    contents; then the first is indexed.
    """

    def __init__(self, num_blocks: int, tables_of_groups: Iterable[slice]) -> None:
        """Create an empty index; `tables_of_groups` say which of a sequence's tables belong to each group."""
        self._tables = tuple(tables_of_groups)
        self._entries: list[dict[int, Entry]] = [{} for _ in self._tables]
        """By group, then by hash."""

        self._of_blocks: list[tuple[int, int, Entry] | None] = [None] * num_blocks
        """For each block, the group, the hash and the entry by which it is found."""

    def has(self, block_id: int) -> bool:
        """Whether `block_id` is indexed."""
        return self._of_blocks[block_id] is not None

    def key_of(self, block_id: int) -> int | None:
        """Return the hash of the contents of `block_id` if it is indexed."""
        indexed = self._of_blocks[block_id]
        return None if indexed is None else indexed[1]

    def find(self, key: int, group: int = 0) -> Entry | None:
        """Return the blocks of a group with the contents of `key`."""
        return self._entries[group].get(key)

    def of_all_groups(self, key: int) -> list[Entry]:
        """Return the blocks with the contents of `key`, an entry for each group that has it."""
        return [entries[key] for entries in self._entries if key in entries]

    def leading(self, keys: Iterable[int], group: int = 0) -> list[Entry]:
        """Return the blocks of the first of `keys`, up to one that is not indexed."""
        entries = self._entries[group]
        return [entries[key] for key in takewhile(entries.__contains__, keys)]

    def add(self, key: int, block_ids: Entry) -> bool:
        """Index an entry of all tables, which is not indexed, by its hash.

        Return False if other blocks of a group have its contents: then these stay indexed.
        """
        is_new = True
        for group, (tables, entries) in enumerate(zip(self._tables, self._entries, strict=True)):
            if key in entries:
                is_new = False
                continue
            entry = entries[key] = block_ids[tables]
            for block_id in entry:
                self._of_blocks[block_id] = (group, key, entry)
        return is_new

    def forget(self, block_id: int) -> Entry:
        """Remove the entry that `block_id` belongs to, if it is indexed, and return its blocks."""
        indexed = self._of_blocks[block_id]
        if indexed is None:
            return ()
        group, key, block_ids = indexed
        del self._entries[group][key]
        for member in block_ids:
            self._of_blocks[member] = None
        return block_ids

    def check_invariants(self) -> None:
        """Check that keys and blocks match.

        Raises:
            AssertionError: an invariant is violated.
        """
        indexed = {
            block_id: (group, key, entry)
            for group, entries in enumerate(self._entries)
            for key, entry in entries.items()
            for block_id in entry
        }
        of_blocks = {block_id: indexed for block_id, indexed in enumerate(self._of_blocks) if indexed is not None}
        assert indexed == of_blocks, "the prefix index and the blocks' hashes differ"
