"""Prefix cache: full computed blocks, found by the hash of their tokens and of everything before them.

The hash is chained over the blocks and begins with the sequence's cache salt (vLLM, SOSP 2023, and its later prefix
cache). It is 128-bit BLAKE2b: collisions cannot be constructed, so token ids need not be kept for comparison.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

from sluice.engine.scheduling.blocks.shared_tails import SharedTail
from sluice.engine.sequence import Sequence

_HASH_BYTES = 16


def root_hash(salt: str) -> int:
    """Return the parent hash of the first block: prefixes under different salts never match."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=_HASH_BYTES, person=b"kv cache salt").digest(), "little")


def block_hash(parent: int, token_ids: Items[int]) -> int:
    """Hash a full block by its tokens and everything before them."""
    content = parent.to_bytes(_HASH_BYTES, "little") + array("I", token_ids).tobytes()
    return int.from_bytes(blake2b(content, digest_size=_HASH_BYTES).digest(), "little")


def extend_hashes(sequence: Sequence, num_blocks: int, block_size: int) -> None:
    """Extend `sequence.block_hashes` to its first `num_blocks` blocks, which are full."""
    hashes = sequence.block_hashes
    if len(hashes) >= num_blocks:
        return
    parent = hashes[-1] if hashes else root_hash(sequence.cache_salt)
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        parent = block_hash(parent, sequence.token_ids[start : start + block_size])
        hashes.append(parent)


class CachedPrefix(NamedTuple):
    """Cached blocks that a sequence without blocks can reuse."""

    block_ids: list[int]
    """Full blocks, shared as they are. Without window groups, those before the sliding window are any."""

    tail: SharedTail | None
    """The block with its next tokens; `token_ids` shares at least one of them."""

    num_tokens: int
    """The sequence's tokens in all of these blocks."""

    num_passed: int = 0
    """Leading entries that are before the sliding window."""

    host_ids: Items[int] = ()
    """Blocks of the host tier that follow `block_ids`."""

    window_ids: Items[tuple[int, ...]] | None = None
    """Blocks of the window groups for the same tokens as `block_ids` from entry `num_passed`; None without groups."""

    @property
    def held_ids(self) -> list[int]:
        """Full blocks that the sequence will hold."""
        if self.window_ids is not None:
            return [*self.block_ids, *chain.from_iterable(self.window_ids)]
        return self.block_ids[self.num_passed :] if self.num_passed else self.block_ids


class PrefixIndex:
    """Which block has the contents of a hash. Mutable.

    A block may be held or free; it stays in the index until it is taken for new contents. Two blocks may have the same
    contents; then the first is indexed.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blocks: dict[int, int] = {}
        self._keys: list[int | None] = [None] * num_blocks

    def __contains__(self, key: int) -> bool:
        return key in self._blocks

    def has(self, block_id: int) -> bool:
        """Whether `block_id` is indexed."""
        return self._keys[block_id] is not None

    def key_of(self, block_id: int) -> int | None:
        """Return the hash of the contents of `block_id` if it is indexed."""
        return self._keys[block_id]

    def find(self, key: int) -> int | None:
        """Return the block with the contents of `key`."""
        return self._blocks.get(key)

    def leading(self, keys: Iterable[int]) -> list[int]:
        """Return the blocks of the first of `keys`, up to one that is not indexed."""
        found: list[int] = []
        for key in keys:
            block_id = self._blocks.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def add(self, key: int, block_id: int) -> bool:
        """Index `block_id`, which is in no index; return False if another block has its contents."""
        if key in self._blocks:
            return False
        self._blocks[key] = block_id
        self._keys[block_id] = key
        return True

    def forget(self, block_id: int) -> None:
        """Remove `block_id` if it is indexed."""
        key = self._keys[block_id]
        if key is not None:
            del self._blocks[key]
            self._keys[block_id] = None

    def check_invariants(self) -> None:
        """Check that keys and blocks match.

        Raises:
            AssertionError: an invariant is violated.
        """
        blocks = {key: block_id for block_id, key in enumerate(self._keys) if key is not None}
        assert blocks == self._blocks, "the prefix index and the blocks' hashes differ"


class _Indexed(NamedTuple):
    """An entry of the tables of window groups, and its hash."""

    key: int
    block_ids: tuple[int, ...]


class WindowIndex:
    """Which blocks of the window groups, one for each, have the contents of a hash. Mutable.

    As `PrefixIndex`, but these blocks are found, and forgotten, together.
    """

    def __init__(self, num_blocks: int) -> None:
        self._entries: dict[int, _Indexed] = {}
        """By hash."""

        self._of_blocks: list[_Indexed | None] = [None] * num_blocks

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    def has(self, block_id: int) -> bool:
        """Whether `block_id` belongs to an indexed entry."""
        return self._of_blocks[block_id] is not None

    def find(self, key: int) -> tuple[int, ...]:
        """Return the blocks with the contents of `key`; empty if there are none."""
        entry = self._entries.get(key)
        return () if entry is None else entry.block_ids

    def add(self, key: int, block_ids: tuple[int, ...]) -> bool:
        """Index `block_ids`, which are in no index; return False if other blocks have their contents."""
        if key in self._entries:
            return False
        entry = self._entries[key] = _Indexed(key, block_ids)
        for block_id in block_ids:
            self._of_blocks[block_id] = entry
        return True

    def forget(self, block_id: int) -> tuple[int, ...]:
        """Remove the entry that `block_id` belongs to, if it is indexed, and return its blocks."""
        entry = self._of_blocks[block_id]
        if entry is None:
            return ()
        del self._entries[entry.key]
        for one in entry.block_ids:
            self._of_blocks[one] = None
        return entry.block_ids

    def check_invariants(self) -> None:
        """Check that keys and blocks match.

        Raises:
            AssertionError: an invariant is violated.
        """
        blocks = {block_id: entry for entry in self._entries.values() for block_id in entry.block_ids}
        assert blocks == {block_id: entry for block_id, entry in enumerate(self._of_blocks) if entry is not None}, (
            "the index of window groups and the blocks' hashes differ"
        )
        assert all(key == entry.key for key, entry in self._entries.items()), "an entry has another's hash"
