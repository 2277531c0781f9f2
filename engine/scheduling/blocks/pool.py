"""Blocks of the KV cache: the free ones in their order of reuse, the references to each, and its contents.

Knows no sequences.

Hot module: every change is O(1).
"""

from collections.abc import Iterable, Iterator

from sluice.engine.scheduling.blocks.host_tier import HostTier
from sluice.engine.scheduling.blocks.prefix_index import Entry, PrefixIndex
from sluice.engine.scheduling.blocks.shared_tails import SharedTail, SharedTails

_ROOM_TO_COPY = 2
"""Free blocks required to copy a free tail instead of reusing it: the copy, and one block to grow into."""


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


class BlockPool:
    """Reference counts, the free list of the blocks without a reference, and the index of contents. Mutable.

    A block without a reference keeps its contents until it is taken for others.
    """

    def __init__(self, num_blocks: int, tables_of_groups: Iterable[slice], host: HostTier) -> None:
        """Create a pool of free blocks; contents that were needed again go to `host` when their block is taken."""
        self.index = PrefixIndex(num_blocks, tables_of_groups)
        self.tails = SharedTails(num_blocks)
        self._host = host
        self._ref_counts = [0] * num_blocks
        self._free = FreeBlocks(num_blocks)
        self._is_wanted = bytearray(num_blocks)
        """Whether a block's contents were found again, or those of a preempted sequence. Only these are saved."""

    @property
    def num_free(self) -> int:
        """Blocks without a reference."""
        return len(self._free)

    def num_references(self, block_id: int) -> int:
        """Return how many hold `block_id`."""
        return self._ref_counts[block_id]

    def is_free(self, block_id: int) -> bool:
        """Whether nothing holds `block_id`."""
        return self._ref_counts[block_id] == 0

    def take(self) -> int:
        """Hold the first free block, for new contents. One must be free."""
        block_id = self._free.pop()
        self._ref_counts[block_id] = 1
        if self._is_wanted[block_id]:
            self._is_wanted[block_id] = False
            if (key := self.index.key_of(block_id)) is not None:
                self._host.save(key, block_id)
        self.tails.forget(block_id)
        self.forget_full(block_id)
        return block_id

    def hold(self, block_id: int) -> None:
        """Add a reference to `block_id`, for the contents that it has."""
        if self._ref_counts[block_id] == 0:
            self._free.remove(block_id)
        self._ref_counts[block_id] += 1

    def want(self, block_ids: Iterable[int]) -> None:
        """Save the contents of `block_ids` to the host tier when these are taken for others."""
        for block_id in block_ids:
            self._is_wanted[block_id] = True

    def let_go(self, block_id: int) -> None:
        """Remove a reference from `block_id`.

        A block that may be found again is reused after all others that are free now, any other before them.
        """
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] > 0:
            return
        if self.is_findable(block_id):
            self._free.push_back(block_id)
        else:
            self._free.push_front(block_id)

    def continue_in(self, tail: SharedTail, num_shared: int, num_left: int) -> tuple[Entry, Entry]:
        """Return the blocks to copy, and those in which a sequence continues: copies of `tail`, or the tail itself.

        The tail is reused in place if it is free and none of its tokens are lost, or if there is no room to keep it.

        Args:
            tail: found after the sequence's full blocks.
            num_shared: its first tokens, which the sequence has; the others will be overwritten.
            num_left: free blocks that nothing else needs.
        """
        block_ids = tail.block_ids
        is_over = not any(map(self.index.has, block_ids)) and num_shared == len(tail.token_ids)
        has_room = num_left >= _ROOM_TO_COPY * len(block_ids)
        is_reused = self.is_free(block_ids[0]) and (is_over or not has_room)
        for block_id in block_ids:
            self.hold(block_id)
        if not is_reused:
            return block_ids, tuple([self.take() for _ in block_ids])
        for block_id in block_ids:
            self.forget_full(block_id)
        self.tails.shorten(block_ids[0], num_shared)
        return (), block_ids

    def put_tail(self, key: int, tail: SharedTail) -> None:
        """Let `tail` be found after the blocks with hash `key`, instead of any other."""
        self._reuse_first(self.tails.put(key, tail))

    def forget(self, block_id: int) -> None:
        """Let the contents of `block_id` not be found again: they are wrong, or about to be overwritten."""
        self.tails.forget(block_id)
        self.forget_full(block_id)

    def forget_full(self, block_id: int) -> None:
        """Let `block_id` not be found as a full block. What is left of its entry is of no use."""
        if block_ids := self.index.forget(block_id):
            self._reuse_first(block_ids)

    def check_invariants(self, held: list[int], block_size: int) -> None:
        """Check the counts against `held`, the references to each block, and the index.

        Raises:
            AssertionError: an invariant is violated.
        """
        free = list(self._free)
        assert held == self._ref_counts, "reference counts differ from the block tables"
        assert len(free) == len(set(free)) == len(self._free), "a block is twice in the free list"
        assert set(free) == {block_id for block_id, count in enumerate(held) if count == 0}, (
            "a block is neither free nor held"
        )
        self.index.check_invariants()
        full_tails = self.tails.check_invariants(block_size)
        assert all(map(self.index.has, full_tails)), "a full tail is not indexed by its hash"

    def is_findable(self, block_id: int) -> bool:
        """Whether a sequence may still find the contents of `block_id`."""
        return self.index.has(block_id) or self.tails.has(block_id)

    def _reuse_first(self, block_ids: Entry) -> None:
        """Move those of `block_ids` to the front that are free, and whose contents cannot be found any more."""
        for block_id in block_ids:
            if self.is_free(block_id) and not self.is_findable(block_id):
                self._free.remove(block_id)
                self._free.push_front(block_id)
