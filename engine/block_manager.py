"""Own the KV cache's blocks: who holds each one, which are free, and which hold a prefix that is known.

Knows nothing of tensors, text or queues. It alone writes a sequence's `block_table`, `num_slots`, `block_hashes`,
`num_published_blocks` and `copied_from`.

A full block is known by a chained hash of its tokens, of the block before it and of the sequence's cache salt (vLLM,
SOSP 2023, and its later prefix cache). The hash is BLAKE2b with 128 bits: nobody can make two prefixes collide, so
token ids need not be kept to compare. A block that nobody holds stays known until it is used again.

A prefix seldom ends with a block: a chat goes on behind the last token of its last turn, prompts differ from some token
on. So the block that was last seen behind each known full block is remembered too, its follower, with the tokens that
are computed in it; it may be full, or its sequence may still fill it. Whoever begins with the first of these tokens
need not compute them. A follower that is nobody's and ends with them is taken over. Else it is copied, as far as it is
filled, before the sequence's first step, and what follows of the copy is written over; until a step with that copy has
succeeded, the copy is to be made again and its source is held as if the sequence had it.

Hot module: no logging, nothing per sequence and step but when a block is full or a new one is needed.
"""

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import NamedTuple

from engine.sequence import Sequence

_HASH_BYTES = 16
_ROOM_TO_COPY = 2
"""Blocks to be free where one that is nobody's is copied: itself, and one into which the sequence may grow."""


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def root_hash(salt: str) -> int:
    """What stands before the first block: prefixes under different salts never meet."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=_HASH_BYTES, person=b"kv cache salt").digest(), "little")


def block_hash(parent: int, token_ids: Items[int]) -> int:
    """Name a full block by its tokens and everything before them."""
    content = parent.to_bytes(_HASH_BYTES, "little") + array("I", token_ids).tobytes()
    return int.from_bytes(blake2b(content, digest_size=_HASH_BYTES).digest(), "little")


def _num_shared(token_ids: list[int], others: list[int]) -> int:
    """How many tokens both begin with."""
    if token_ids == others:
        return len(others)
    pairs = enumerate(zip(token_ids, others, strict=False))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), min(len(token_ids), len(others)))


class FreeBlocks:
    """Block ids in the order in which they are used again: an intrusive doubly linked list, every change O(1)."""

    def __init__(self, num_blocks: int) -> None:
        # The entry after the last block is the sentinel: its next is the head, its previous the tail.
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
        """Take the head. The caller knows that there is one."""
        block_id = self._next[self._sentinel]
        self.remove(block_id)
        return block_id

    def remove(self, block_id: int) -> None:
        """Take `block_id` out, wherever it stands. The caller knows that it is here."""
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before
        self._size -= 1

    def push_front(self, block_id: int) -> None:
        """Let `block_id` be the next one used."""
        self._insert(self._sentinel, block_id, self._next[self._sentinel])

    def push_back(self, block_id: int) -> None:
        """Let `block_id` be the last one used."""
        self._insert(self._previous[self._sentinel], block_id, self._sentinel)

    def _insert(self, before: int, block_id: int, after: int) -> None:
        self._previous[block_id], self._next[block_id] = before, after
        self._next[before] = block_id
        self._previous[after] = block_id
        self._size += 1


class Follower(NamedTuple):
    """A block behind a known one, whoever holds it, and the tokens whose keys and values it begins with.

    If it has all of a block's, it is itself known by its hash.
    """

    block_id: int
    token_ids: list[int]


class Reusable(NamedTuple):
    """What the cache has of a sequence that holds no blocks."""

    block_ids: list[int]
    """Full blocks that it can hold as they are."""

    follower: Follower | None
    """What begins with its next tokens: those of `token_ids` that it shares, at least one."""

    num_tokens: int
    """Its tokens in all of them."""


class BlockManager:
    """Reference-counted blocks, a free list, and the prefix cache. A method that says no has changed nothing."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._is_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._hashes: list[int | None] = [None] * num_blocks
        self._free = FreeBlocks(num_blocks)
        self._known: dict[int, int] = {}
        self._followers: dict[int, Follower] = {}
        """By the hash of the block before."""

        self._key_of_follower: list[int | None] = [None] * num_blocks
        """The key of each block in `_followers`."""

        self.num_pending_copies = 0
        """Sequences whose `copied_from` is not None."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, known or not."""
        return len(self._free)

    def known_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that already hold the beginning of `sequence`, less than all of it: one token must give logits."""
        if not self._is_caching:
            return []
        self._hash_up_to(sequence, (sequence.num_tokens - 1) // self.block_size)
        found: list[int] = []
        for key in sequence.block_hashes[: (sequence.num_tokens - 1) // self.block_size]:
            block_id = self._known.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_known_tokens(self, sequence: Sequence) -> int:
        """Tokens of a waiting `sequence` whose keys and values are in the cache already."""
        return self._reusable(sequence).num_tokens

    def next_hash(self, sequence: Sequence) -> int | None:
        """Hash of the first full block of `sequence` that nobody finds yet; None if there is no such block.

        For one that waits it is the first that it lacks, for one that holds blocks the first that it will publish.
        """
        num_found = sequence.num_published_blocks if sequence.block_table else len(self.known_prefix(sequence))
        num_full = min(len(sequence.block_hashes), (sequence.num_tokens - 1) // self.block_size)
        return sequence.block_hashes[num_found] if num_found < num_full else None

    def num_coming_tokens(self, sequence: Sequence, other: Sequence) -> int:
        """Tokens that a waiting `sequence` will find once `other`, with the same `next_hash`, is computed."""
        lacking = sequence.block_hashes[len(self.known_prefix(sequence)) :]
        coming = other.block_hashes[other.num_published_blocks :]
        # Hashes are chained: two that are equal stand for equal beginnings.
        return sum(mine == theirs for mine, theirs in zip(lacking, coming, strict=False)) * self.block_size

    def try_hold(self, sequence: Sequence, *, num_spare: int, num_held: int = 0) -> int | None:
        """Give a sequence without blocks all that its known tokens need.

        Args:
            sequence: waiting, with an empty block table.
            num_spare: blocks that must be free afterwards.
            num_held: tokens that its blocks must hold, if more than it has: what it may yet generate.

        Returns:
            Tokens whose keys and values are in the cache already; None if there are not enough blocks.
        """
        known, follower, num_cached = self._reusable(sequence)
        num_new = blocks_needed(max(sequence.num_tokens, num_held), self.block_size) - len(known)
        num_idle = sum(self._ref_counts[block_id] == 0 for block_id in known)
        num_left = len(self._free) - num_new - num_idle - num_spare
        if num_left < 0:
            return None
        for block_id in known:
            self._hold(block_id)
        if follower is not None:
            num_shared = num_cached - len(known) * self.block_size
            known.append(self._continue_in(sequence, follower, num_shared, num_left))
            num_new -= 1
        sequence.block_table = known + [self._take() for _ in range(num_new)]
        sequence.num_slots = len(sequence.block_table) * self.block_size
        sequence.num_published_blocks = num_cached // self.block_size
        return num_cached

    def try_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` the blocks that it lacks to hold `num_tokens`, or change nothing and return False."""
        num_new = blocks_needed(num_tokens, self.block_size) - len(sequence.block_table)
        if num_new > len(self._free):
            return False
        for _ in range(num_new):
            sequence.block_table.append(self._take())
        sequence.num_slots = len(sequence.block_table) * self.block_size
        return True

    def publish(self, sequence: Sequence) -> None:
        """Make the full computed blocks of `sequence` findable. Only after the step that computed them succeeded."""
        num_full = sequence.num_computed_tokens // self.block_size
        if self._is_caching:
            self._hash_up_to(sequence, num_full)
            self._make_known(sequence, range(sequence.num_published_blocks, num_full))
        sequence.num_published_blocks = num_full
        self._publish_last(sequence)

    def end_copy(self, sequence: Sequence) -> None:
        """Let go of what the block of `sequence` was copied from. Only once a step with that copy has succeeded."""
        if sequence.copied_from is not None:
            self._let_go(sequence.copied_from)
            sequence.copied_from = None
            self.num_pending_copies -= 1

    def retract(self, sequence: Sequence) -> None:
        """Make the blocks of `sequence` unfindable: what is in them may be wrong."""
        for block_id in sequence.block_table:
            self._forget(block_id)
        for key in sequence.block_hashes:
            if key in self._followers:
                self._drop_follower(self._followers[key].block_id)
        sequence.num_published_blocks = 0

    def release(self, sequence: Sequence) -> None:
        """Take the blocks of `sequence` back.

        From its last to its first, so that a chain is used again from its end; those that nobody can find are used
        first.
        """
        if sequence.copied_from is None:
            self._publish_last(sequence)
        else:
            # Nobody knows whether its copy was made.
            self.end_copy(sequence)
        for block_id in reversed(sequence.block_table):
            self._let_go(block_id)
        # A new list: a step in flight may still read the old one.
        sequence.block_table = []
        sequence.num_slots = 0
        sequence.num_published_blocks = 0

    def check_invariants(self, holders: Iterable[Sequence]) -> None:
        """Check that every block is either free or held exactly by `holders`.

        Raises:
            AssertionError: the books do not balance.
        """
        held = [0] * self.num_blocks
        num_pending_copies = 0
        for sequence in holders:
            for block_id in sequence.block_table:
                held[block_id] += 1
            if sequence.copied_from is not None:
                held[sequence.copied_from] += 1
                num_pending_copies += 1
                copy = sequence.block_table[sequence.num_computed_tokens // self.block_size]
                assert self._ref_counts[copy] == 1, "a block that is not copied yet has two holders"
                is_found = self._hashes[copy] is not None or self._key_of_follower[copy] is not None
                assert not is_found, "a block that is not copied yet is found"
        assert num_pending_copies == self.num_pending_copies, "a copy is lost"
        free = list(self._free)
        assert held == self._ref_counts, "reference counts differ from the block tables"
        assert len(free) == len(set(free)) == len(self._free), "a block is twice in the free list"
        assert set(free) == {block_id for block_id, count in enumerate(held) if count == 0}, "a block is lost"
        hashes = {key: block_id for block_id, key in enumerate(self._hashes) if key is not None}
        assert hashes == self._known, "the prefix cache finds other blocks than those that carry its hashes"
        followers = {key: block_id for block_id, key in enumerate(self._key_of_follower) if key is not None}
        assert followers == {key: one.block_id for key, one in self._followers.items()}, "a follower is known wrongly"
        for block_id, token_ids in self._followers.values():
            assert 0 < len(token_ids) <= self.block_size, "a follower has too many tokens, or none"
            is_full = len(token_ids) == self.block_size
            assert not is_full or self._hashes[block_id] is not None, "a full follower is not known by its hash"

    def _reusable(self, sequence: Sequence) -> Reusable:
        known = self.known_prefix(sequence)
        num_tokens = len(known) * self.block_size
        follower = self._followers.get(sequence.block_hashes[len(known) - 1]) if known else None
        if follower is None:
            return Reusable(known, None, num_tokens)
        # One token must give logits.
        end = min(num_tokens + self.block_size, sequence.num_tokens - 1)
        num_shared = _num_shared(sequence.token_ids[num_tokens:end], follower.token_ids)
        return Reusable(known, follower if num_shared else None, num_tokens + num_shared)

    def _continue_in(self, sequence: Sequence, follower: Follower, num_shared: int, num_left: int) -> int:
        """The block in which `sequence` goes on: `follower` itself, or one that is to become its copy.

        It is taken over if it is nobody's and nothing in it is lost, or if there is no room to keep it.
        """
        block_id, token_ids = follower
        is_idle = self._ref_counts[block_id] == 0
        is_over = self._hashes[block_id] is None and num_shared == len(token_ids)
        self._hold(block_id)
        if is_idle and (is_over or num_left < _ROOM_TO_COPY):
            key = self._key_of_follower[block_id]
            self._forget(block_id)
            if key is not None:
                self._set_follower(key, Follower(block_id, token_ids[:num_shared]))
            return block_id
        sequence.copied_from = block_id
        self.num_pending_copies += 1
        return self._take()

    def _publish_last(self, sequence: Sequence) -> None:
        """Let the last computed block of `sequence` be found, if it is not full, and what is before it is known.

        Nothing is shown of one that was retracted, or whose prefix was, with another that shared it.
        """
        num_full, num_more = divmod(sequence.num_computed_tokens, self.block_size)
        is_findable = self._is_caching and num_full == sequence.num_published_blocks > 0
        if num_more == 0 or not is_findable:
            return
        key, block_id = sequence.block_hashes[num_full - 1], sequence.block_table[num_full]
        if key in self._known:
            token_ids = sequence.token_ids[num_full * self.block_size : sequence.num_computed_tokens]
            self._set_follower(key, Follower(block_id, token_ids))

    def _set_follower(self, key: int, follower: Follower) -> None:
        """Remember what follows the block with hash `key`, in the place of what did."""
        if key in self._followers:
            displaced = self._followers[key].block_id
            self._drop_follower(displaced)
            if self._ref_counts[displaced] == 0 and self._hashes[displaced] is None:
                # Nobody finds it any more: it is used before those that somebody may.
                self._free.remove(displaced)
                self._free.push_front(displaced)
        self._followers[key] = follower
        self._key_of_follower[follower.block_id] = key

    def _drop_follower(self, block_id: int) -> None:
        key = self._key_of_follower[block_id]
        if key is not None:
            del self._followers[key]
            self._key_of_follower[block_id] = None

    def _hold(self, block_id: int) -> None:
        if self._ref_counts[block_id] == 0:
            self._free.remove(block_id)
        self._ref_counts[block_id] += 1

    def _let_go(self, block_id: int) -> None:
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] > 0:
            return
        if self._hashes[block_id] is None and self._key_of_follower[block_id] is None:
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
                    self._set_follower(parent, Follower(block_id, sequence.token_ids[start : start + self.block_size]))

    def _forget(self, block_id: int) -> None:
        key = self._hashes[block_id]
        if key is not None:
            del self._known[key]
            self._hashes[block_id] = None
        self._drop_follower(block_id)

    def _hash_up_to(self, sequence: Sequence, num_blocks: int) -> None:
        hashes, size = sequence.block_hashes, self.block_size
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else root_hash(sequence.cache_salt)
        for start in range(len(hashes) * size, num_blocks * size, size):
            parent = block_hash(parent, sequence.token_ids[start : start + size])
            hashes.append(parent)
