"""Shared tails: the block that was last seen after an indexed one, and the tokens that it begins with.

Prefixes rarely end at a block boundary: a chat continues after the last token of its previous turn, and prompts diverge
at arbitrary tokens. A tail may be full, or its sequence may still be filling it. A sequence that begins with the first
of its tokens need not compute them.
"""

from typing import NamedTuple


class SharedTail(NamedTuple):
    """The blocks after an indexed entry, held or free, and the tokens whose keys and values they begin with.

    A full tail is also indexed by its own hash.
    """

    block_ids: tuple[int, ...]
    """One for each block table."""

    token_ids: list[int]

    def num_common(self, token_ids: list[int]) -> int:
        """Return how many tokens of the tail `token_ids` begins with."""
        if token_ids == self.token_ids:
            return len(token_ids)
        pairs = enumerate(zip(token_ids, self.token_ids, strict=False))
        shorter = min(len(token_ids), len(self.token_ids))
        return next((index for index, (mine, theirs) in pairs if mine != theirs), shorter)


class SharedTails:
    """The tail after each indexed block, by the hash of that block. Mutable."""

    def __init__(self, num_blocks: int) -> None:
        self._tails: dict[int, SharedTail] = {}
        self._keys: list[int | None] = [None] * num_blocks
        """The key of each block in `_tails`."""

    def after(self, key: int) -> SharedTail | None:
        """Return the tail after the block with hash `key`."""
        return self._tails.get(key)

    def has(self, block_id: int) -> bool:
        """Whether `block_id` is a tail, or a part of one."""
        return self._keys[block_id] is not None

    def put(self, key: int, tail: SharedTail) -> tuple[int, ...]:
        """Set the tail after the block with hash `key`; return the blocks of the one that it replaces."""
        replaced = self._tails.get(key)
        if replaced is not None:
            self.forget(replaced.block_ids[0])
        self._tails[key] = tail
        for block_id in tail.block_ids:
            self._keys[block_id] = key
        return () if replaced is None else replaced.block_ids

    def shorten(self, block_id: int, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens of the tail `block_id`: the others are about to be overwritten."""
        key = self._keys[block_id]
        if key is not None:
            tail = self._tails[key]
            self._tails[key] = tail._replace(token_ids=tail.token_ids[:num_tokens])

    def forget(self, block_id: int) -> None:
        """Remove the tail that `block_id` is a part of, if it is."""
        key = self._keys[block_id]
        if key is not None:
            for member in self._tails.pop(key).block_ids:
                self._keys[member] = None

    def check_invariants(self, block_size: int) -> set[int]:
        """Check that keys and tails match, and return the blocks of the full ones.

        Raises:
            AssertionError: an invariant is violated.
        """
        keys = {block_id: key for block_id, key in enumerate(self._keys) if key is not None}
        assert keys == {block_id: key for key, tail in self._tails.items() for block_id in tail.block_ids}, (
            "the tail index and the blocks' keys differ"
        )
        tails = self._tails.values()
        assert all(0 < len(tail.token_ids) <= block_size for tail in tails), (
            "a tail has no tokens, or more than a block"
        )
        return {block_id for tail in tails if len(tail.token_ids) == block_size for block_id in tail.block_ids}
