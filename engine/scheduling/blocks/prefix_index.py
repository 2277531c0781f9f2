"""Prefix cache: full computed blocks, found by the hash of their tokens and of everything before them.

The hash (`sequence.block_hash`) is chained over the blocks and begins with the sequence's cache salt (vLLM, SOSP 2023,
and its later prefix cache).
"""

from collections.abc import Iterable

Entry = tuple[int, ...]
"""The blocks of one entry of the tables of a group: they have the keys and values of the same tokens."""


class PrefixIndex:
    """Which blocks have the contents of a hash, for the tables of each group. Mutable.

    A block may be held or free; it stays in the index until it is taken for new contents. Two entries may have the same
    contents; then the first is indexed.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        self._entries: list[dict[int, Entry]] = [{} for _ in range(num_groups)]
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

    def leading(self, keys: Iterable[int], group: int = 0) -> list[Entry]:
        """Return the blocks of the first of `keys`, up to one that is not indexed."""
        entries, found = self._entries[group], list[Entry]()
        for key in keys:
            entry = entries.get(key)
            if entry is None:
                break
            found.append(entry)
        return found

    def add(self, key: int, block_ids: Entry, group: int = 0) -> bool:
        """Index `block_ids`, which are not indexed; return False if other blocks have their contents."""
        if key in self._entries[group]:
            return False
        self._entries[group][key] = block_ids
        indexed = (group, key, block_ids)
        for block_id in block_ids:
            self._of_blocks[block_id] = indexed
        return True

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
        assert indexed == {block_id: one for block_id, one in enumerate(self._of_blocks) if one is not None}, (
            "the prefix index and the blocks' hashes differ"
        )
