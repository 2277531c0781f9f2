"""Blocks of the KV cache as numbers: who is free, in which order they are used again, and how many hold each.

Hot module: every change is O(1).
"""

from collections.abc import Iterator


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
    """Reference counts, and the free list of the blocks without a reference. Mutable.

    A block without a reference keeps its contents until it is taken.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = FreeBlocks(num_blocks)

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
        return block_id

    def hold(self, block_id: int) -> None:
        """Add a reference to `block_id`, for the contents that it has."""
        if self._ref_counts[block_id] == 0:
            self._free.remove(block_id)
        self._ref_counts[block_id] += 1

    def let_go(self, block_id: int, *, is_useful: bool) -> None:
        """Remove a reference from `block_id`.

        Args:
            block_id: held.
            is_useful: whether its contents may be found again: then it is reused after all others that are free now,
                else before them.
        """
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] > 0:
            return
        if is_useful:
            self._free.push_back(block_id)
        else:
            self._free.push_front(block_id)

    def reuse_first(self, block_id: int) -> None:
        """Move `block_id` to the front if it is free: its contents are of no use any more."""
        if self._ref_counts[block_id] == 0:
            self._free.remove(block_id)
            self._free.push_front(block_id)

    def check_invariants(self, held: list[int]) -> None:
        """Check the counts against `held`, the references to each block.

        Raises:
            AssertionError: an invariant is violated.
        """
        free = list(self._free)
        assert held == self._ref_counts, "reference counts differ from the block tables"
        assert len(free) == len(set(free)) == len(self._free), "a block is twice in the free list"
        assert set(free) == {block_id for block_id, count in enumerate(held) if count == 0}, (
            "a block is neither free nor held"
        )
