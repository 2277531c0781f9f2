"""Manage the KV cache's blocks: reference counts, the free list and the prefix cache.

Knows nothing of tensors, text or queues. Only this module writes a sequence's `block_table`, `num_slots`,
`block_hashes`, `num_published_blocks` and `cow_source`.

A full block is indexed by a chained hash of its tokens, the block before it and the sequence's cache salt (vLLM, SOSP
2023, and its later prefix cache). The hash is 128-bit BLAKE2b: collisions cannot be constructed, so token ids need not
be kept for comparison. A free block stays in the index until it is reused.

Prefixes rarely end at a block boundary: a chat continues after the last token of its previous turn, and prompts diverge
at arbitrary tokens. So the index also keeps, for each full block, the block last seen after it and the tokens computed
in that block: its shared tail. The tail may be full, or its sequence may still be filling it. A sequence that begins
with the first of these tokens need not compute them. A free tail whose tokens all match is reused in place. Otherwise
the tail is copied before the sequence's first step (copy-on-write), and the tokens that follow overwrite the copy.
Until a step with that copy has succeeded, the copy is repeated in each step and its source keeps a reference.

Hot module: no logging; per sequence and step, work only when a block fills up or a new one is needed.
"""

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import NamedTuple

from sluice.engine.sequence import Sequence

_HASH_BYTES = 16
_ROOM_TO_COPY = 2
"""Free blocks required to copy a free tail instead of reusing it: the copy, and one block to grow into."""


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def root_hash(salt: str) -> int:
    """Return the parent hash of the first block: prefixes under different salts never match."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=_HASH_BYTES, person=b"kv cache salt").digest(), "little")


def block_hash(parent: int, token_ids: Items[int]) -> int:
    """Hash a full block by its tokens and everything before them."""
    content = parent.to_bytes(_HASH_BYTES, "little") + array("I", token_ids).tobytes()
    return int.from_bytes(blake2b(content, digest_size=_HASH_BYTES).digest(), "little")


def _num_shared(token_ids: list[int], others: list[int]) -> int:
    """Return the length of the common prefix."""
    if token_ids == others:
        return len(others)
    pairs = enumerate(zip(token_ids, others, strict=False))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), min(len(token_ids), len(others)))


class FreeBlocks:
    """Block ids in order of reuse: an intrusive doubly linked list, every change O(1)."""

    def __init__(self, num_blocks: int) -> None:
        # The entry after the last block is the sentinel: its next is the head, its previous the last.
        self._sentinel = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self._size = num_blocks

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[self._sentinel]
        while block_id != self._sentinel:
            yield block_id
            block_id = self._next[block_id]

    def pop(self) -> int:
        """Take the head. The list must not be empty."""
        block_id = self._next[self._sentinel]
        self.remove(block_id)
        return block_id

    def remove(self, block_id: int) -> None:
        """Remove `block_id`, which must be in the list."""
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before
        self._size -= 1

    def push_front(self, block_id: int) -> None:
        """Make `block_id` the first to be reused."""
        self._insert(self._sentinel, block_id, self._next[self._sentinel])

    def push_back(self, block_id: int) -> None:
        """Make `block_id` the last to be reused."""
        self._insert(self._previous[self._sentinel], block_id, self._sentinel)

    def _insert(self, before: int, block_id: int, after: int) -> None:
        self._previous[block_id], self._next[block_id] = before, after
        self._next[before] = block_id
        self._previous[after] = block_id
        self._size += 1


class SharedTail(NamedTuple):
    """The block after an indexed one, held or free, and the tokens whose keys and values it begins with.

    A full tail is also indexed by its own hash.
    """

    block_id: int
    token_ids: list[int]


class CachedPrefix(NamedTuple):
    """Cached blocks that a sequence without blocks can reuse."""

    block_ids: list[int]
    """Full blocks, shared as they are."""

    tail: SharedTail | None
    """The block with its next tokens; `token_ids` shares at least one of them."""

    num_tokens: int
    """The sequence's tokens in all of these blocks."""


class BlockManager:
    """Reference-counted blocks, a free list, and the prefix cache. A method that fails changes nothing."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._is_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._hashes: list[int | None] = [None] * num_blocks
        self._free = FreeBlocks(num_blocks)
        self._known: dict[int, int] = {}
        self._tails: dict[int, SharedTail] = {}
        """By the hash of the preceding block."""

        self._key_of_tail: list[int | None] = [None] * num_blocks
        """The key of each block in `_tails`."""

        self.num_pending_copies = 0
        """Sequences whose `cow_source` is not None."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference, indexed or not."""
        return len(self._free)

    def lookup(self, sequence: Sequence) -> CachedPrefix:
        """Return the cached blocks that a waiting `sequence` begins with; its last token must yield logits."""
        known = self._known_prefix(sequence)
        num_tokens = len(known) * self.block_size
        tail = self._tails.get(sequence.block_hashes[len(known) - 1]) if known else None
        if tail is None:
            return CachedPrefix(known, None, num_tokens)
        # One token must yield logits.
        end = min(num_tokens + self.block_size, sequence.num_tokens - 1)
        num_shared = _num_shared(sequence.token_ids[num_tokens:end], tail.token_ids)
        return CachedPrefix(known, tail if num_shared else None, num_tokens + num_shared)

    def next_hash(self, sequence: Sequence, num_found: int) -> int | None:
        """Return the hash of the full block of `sequence` after its first `num_found`; None if there is none.

        For a waiting sequence it is the first block that it lacks; for one that holds blocks, the first that it will
        publish.
        """
        num_full = min(len(sequence.block_hashes), (sequence.num_tokens - 1) // self.block_size)
        return sequence.block_hashes[num_found] if num_found < num_full else None

    def num_common_tokens(self, sequence: Sequence, num_found: int, other: Sequence) -> int:
        """Return the tokens that `sequence`, which has found some blocks, will find once `other` is computed.

        Both have the same `next_hash`.
        """
        lacking = sequence.block_hashes[num_found:]
        coming = other.block_hashes[other.num_published_blocks :]
        # Hashes are chained: equal hashes mean equal prefixes.
        return sum(mine == theirs for mine, theirs in zip(lacking, coming, strict=False)) * self.block_size

    def try_hold(self, sequence: Sequence, found: CachedPrefix, *, num_spare: int, num_held: int = 0) -> bool:
        """Give a sequence without blocks all blocks that its known tokens need, or change nothing and return False.

        Args:
            sequence: waiting, with an empty block table.
            found: of `lookup`, since which no block was taken or released.
            num_spare: blocks that must stay free afterwards.
            num_held: tokens to reserve blocks for, if more than the sequence has: its longest possible output.
        """
        known, tail, num_cached = found
        num_new = blocks_needed(max(sequence.num_tokens, num_held), self.block_size) - len(known)
        num_idle = sum(self._ref_counts[block_id] == 0 for block_id in known)
        num_left = len(self._free) - num_new - num_idle - num_spare
        if num_left < 0:
            return False
        for block_id in known:
            self._hold(block_id)
        table = known.copy()
        if tail is not None:
            num_shared = num_cached - len(known) * self.block_size
            table.append(self._continue_in(sequence, tail, num_shared, num_left))
            num_new -= 1
        sequence.block_table = table + [self._take() for _ in range(num_new)]
        sequence.num_slots = len(sequence.block_table) * self.block_size
        sequence.num_published_blocks = num_cached // self.block_size
        return True

    def try_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` the blocks it lacks to hold `num_tokens`, or change nothing and return False."""
        num_new = blocks_needed(num_tokens, self.block_size) - len(sequence.block_table)
        if num_new > len(self._free):
            return False
        for _ in range(num_new):
            sequence.block_table.append(self._take())
        sequence.num_slots = len(sequence.block_table) * self.block_size
        return True

    def publish(self, sequence: Sequence) -> None:
        """Index the full computed blocks of `sequence`. Call only after the step that computed them has succeeded."""
        num_full = sequence.num_computed_tokens // self.block_size
        if self._is_caching:
            self._hash_up_to(sequence, num_full)
            self._make_known(sequence, range(sequence.num_published_blocks, num_full))
        sequence.num_published_blocks = num_full
        self._publish_last(sequence)

    def end_copy(self, sequence: Sequence) -> None:
        """Release the copy-on-write source of `sequence`. Call only after a step with the copy has succeeded."""
        if sequence.cow_source is not None:
            self._let_go(sequence.cow_source)
            sequence.cow_source = None
            self.num_pending_copies -= 1

    def retract(self, sequence: Sequence) -> None:
        """Remove the blocks of `sequence` from the prefix index: their content may be wrong."""
        for block_id in sequence.block_table:
            self._forget(block_id)
        for key in sequence.block_hashes:
            if key in self._tails:
                self._drop_tail(self._tails[key].block_id)
        sequence.num_published_blocks = 0

    def release(self, sequence: Sequence) -> None:
        """Take the blocks of `sequence` back.

        The last block comes first, so that a chain is reused from its end. Blocks that are not indexed are reused
        before all others.
        """
        if sequence.cow_source is None:
            self._publish_last(sequence)
        else:
            # It is unknown whether the copy was made.
            self.end_copy(sequence)
        for block_id in reversed(sequence.block_table):
            self._let_go(block_id)
        # A new list: a step in flight may still read the old one.
        sequence.block_table = []
        sequence.num_slots = 0
        sequence.num_published_blocks = 0

    def check_invariants(self, holders: Iterable[Sequence]) -> None:
        """Check that every block is either free or held by exactly `holders`.

        Raises:
            AssertionError: an invariant is violated.
        """
        held = [0] * self.num_blocks
        num_pending_copies = 0
        for sequence in holders:
            for block_id in sequence.block_table:
                held[block_id] += 1
            if sequence.cow_source is not None:
                held[sequence.cow_source] += 1
                num_pending_copies += 1
                copy = sequence.block_table[sequence.num_computed_tokens // self.block_size]
                assert self._ref_counts[copy] == 1, "the destination of a pending copy has two holders"
                is_found = self._hashes[copy] is not None or self._key_of_tail[copy] is not None
                assert not is_found, "the destination of a pending copy is indexed"
        assert num_pending_copies == self.num_pending_copies, "the number of pending copies is wrong"
        free = list(self._free)
        assert held == self._ref_counts, "reference counts differ from the block tables"
        assert len(free) == len(set(free)) == len(self._free), "a block is twice in the free list"
        assert set(free) == {block_id for block_id, count in enumerate(held) if count == 0}, (
            "a block is neither free nor held"
        )
        hashes = {key: block_id for block_id, key in enumerate(self._hashes) if key is not None}
        assert hashes == self._known, "the prefix index and the blocks' hashes differ"
        tails = {key: block_id for block_id, key in enumerate(self._key_of_tail) if key is not None}
        assert tails == {key: one.block_id for key, one in self._tails.items()}, (
            "the tail index and the blocks' keys differ"
        )
        for block_id, token_ids in self._tails.values():
            assert 0 < len(token_ids) <= self.block_size, "a tail has no tokens, or more than a block"
            is_full = len(token_ids) == self.block_size
            assert not is_full or self._hashes[block_id] is not None, "a full tail is not indexed by its hash"

    def _known_prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached full blocks that `sequence` begins with."""
        if not self._is_caching:
            return []
        num_full = (sequence.num_tokens - 1) // self.block_size
        self._hash_up_to(sequence, num_full)
        found: list[int] = []
        for key in sequence.block_hashes[:num_full]:
            block_id = self._known.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _continue_in(self, sequence: Sequence, tail: SharedTail, num_shared: int, num_left: int) -> int:
        """Return the block in which `sequence` continues: `tail` itself, or a block to copy it to.

        The tail is reused in place if it is free and none of its tokens are lost, or if there is no room to keep it.
        """
        block_id, token_ids = tail
        is_idle = self._ref_counts[block_id] == 0
        is_over = self._hashes[block_id] is None and num_shared == len(token_ids)
        self._hold(block_id)
        if is_idle and (is_over or num_left < _ROOM_TO_COPY):
            key = self._key_of_tail[block_id]
            self._forget(block_id)
            if key is not None:
                self._set_tail(key, SharedTail(block_id, token_ids[:num_shared]))
            return block_id
        sequence.cow_source = block_id
        self.num_pending_copies += 1
        return self._take()

    def _publish_last(self, sequence: Sequence) -> None:
        """Index the last, partially filled block of `sequence` as the tail of the block before it.

        Does nothing if the sequence, or another one that shares its prefix, was retracted.
        """
        num_full, num_more = divmod(sequence.num_computed_tokens, self.block_size)
        is_findable = self._is_caching and num_full == sequence.num_published_blocks > 0
        if num_more == 0 or not is_findable:
            return
        key, block_id = sequence.block_hashes[num_full - 1], sequence.block_table[num_full]
        if key in self._known:
            token_ids = sequence.token_ids[num_full * self.block_size : sequence.num_computed_tokens]
            self._set_tail(key, SharedTail(block_id, token_ids))

    def _set_tail(self, key: int, tail: SharedTail) -> None:
        """Index the block after the one with hash `key`, replacing the previous tail."""
        if key in self._tails:
            displaced = self._tails[key].block_id
            self._drop_tail(displaced)
            if self._ref_counts[displaced] == 0 and self._hashes[displaced] is None:
                # No longer indexed: reuse it before the blocks that are.
                self._free.remove(displaced)
                self._free.push_front(displaced)
        self._tails[key] = tail
        self._key_of_tail[tail.block_id] = key

    def _drop_tail(self, block_id: int) -> None:
        key = self._key_of_tail[block_id]
        if key is not None:
            del self._tails[key]
            self._key_of_tail[block_id] = None

    def _hold(self, block_id: int) -> None:
        if self._ref_counts[block_id] == 0:
            self._free.remove(block_id)
        self._ref_counts[block_id] += 1

    def _let_go(self, block_id: int) -> None:
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] > 0:
            return
        if self._hashes[block_id] is None and self._key_of_tail[block_id] is None:
            self._free.push_front(block_id)
        else:
            self._free.push_back(block_id)

    def _take(self) -> int:
        block_id = self._free.pop()
        self._forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _make_known(self, sequence: Sequence, indices: range) -> None:
        for index in indices:
            key, block_id = sequence.block_hashes[index], sequence.block_table[index]
            if key not in self._known:
                self._known[key] = block_id
                self._hashes[block_id] = key
                if index and (parent := sequence.block_hashes[index - 1]) in self._known:
                    start = index * self.block_size
                    self._set_tail(parent, SharedTail(block_id, sequence.token_ids[start : start + self.block_size]))

    def _forget(self, block_id: int) -> None:
        key = self._hashes[block_id]
        if key is not None:
            del self._known[key]
            self._hashes[block_id] = None
        self._drop_tail(block_id)

    def _hash_up_to(self, sequence: Sequence, num_blocks: int) -> None:
        hashes, size = sequence.block_hashes, self.block_size
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else root_hash(sequence.cache_salt)
        for start in range(len(hashes) * size, num_blocks * size, size):
            parent = block_hash(parent, sequence.token_ids[start : start + size])
            hashes.append(parent)
