"""Block tables of sequences: which blocks of the KV cache each one holds. Read `lookup`, `try_hold` and `publish`.

Knows nothing of tensors, text or queues.

`BlockPool` counts references, and knows the free blocks and the contents of all. Full blocks that a sequence begins
with are shared as they are (`PrefixIndex`). Of the block after them (`SharedTails`) a sequence may need only the first
tokens. A free tail whose tokens all match is reused in place. Otherwise the tail is copied before the sequence's first
step (copy-on-write), and the tokens that follow overwrite the copy. Until a step with that copy has succeeded, the copy
is repeated in each step and its source keeps a reference.

A sequence has one block table, or several (`windows`): all from one pool, so no table lacks blocks that another has to
spare. A cached prefix needs all blocks of layers that attend to all tokens, and of layers with a sliding window those
in the window at its end. Blocks that left the window are given back.

Hot module: no logging; per sequence and step, work only when a block fills up or a new one is needed.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

from sluice.engine.executor import blocks_needed
from sluice.engine.scheduling.blocks.host_tier import HostTier
from sluice.engine.scheduling.blocks.pool import BlockPool
from sluice.engine.scheduling.blocks.prefix_index import Entry
from sluice.engine.scheduling.blocks.shared_tails import SharedTail
from sluice.engine.scheduling.blocks.windows import TableGroups, WindowSizes
from sluice.engine.sequence import Sequence, held_blocks


class CachedPrefix(NamedTuple):
    """Cached blocks that a sequence without blocks can reuse."""

    tables: list[list[int]]
    """Full blocks, shared as they are: the same number for each block table."""

    num_tokens: int = 0
    """The sequence's tokens in all of these blocks."""

    num_passed: int = 0
    """Leading entries that are before the sliding window. See `Sequence.num_passed_blocks`."""

    tail: SharedTail | None = None
    """The blocks with its next tokens; `token_ids` shares at least one of them."""

    host_ids: Items[int] = ()
    """Blocks of the host tier that follow those of `tables`."""

    @property
    def num_blocks(self) -> int:
        """Full blocks for each table."""
        return len(self.tables[0])

    @property
    def held_blocks(self) -> list[int]:
        """Full blocks that the sequence will hold."""
        return held_blocks(self.tables, self.num_passed)


class BlockManager:
    """Block tables over one pool of blocks. A method that fails changes nothing."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        window: WindowSizes | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        """Create a manager of free blocks.

        Args:
            num_blocks: of the cache.
            block_size: token slots in a block.
            enable_prefix_caching: whether computed blocks are found again.
            window: of all layers, or of the window groups; None: all layers attend to all tokens.
            num_host_blocks: blocks of the host tier; unused with a window.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host = HostTier(num_host_blocks if window is None else 0)
        self._is_caching = enable_prefix_caching
        self._groups = TableGroups(block_size, window)
        self._pool = BlockPool(num_blocks, self._groups.tables, self.host)
        self.num_pending_copies = 0
        """Sequences with pending copies or loads."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference, indexed or not."""
        return self._pool.num_free

    def lookup(self, sequence: Sequence) -> CachedPrefix:
        """Return the cached blocks that a waiting `sequence` begins with; its last token must yield logits."""
        size, num_full = self.block_size, (sequence.num_tokens - 1) // self.block_size
        if self._is_caching:
            sequence.extend_hashes(num_full, size)
        if not self._is_caching or not num_full or sequence.needs_all:
            return CachedPrefix([[] for _ in range(self._groups.num_tables)])
        keys = sequence.block_hashes[:num_full]
        tables = self._groups.cached(keys, self._pool.index)
        num_blocks, num_tokens = len(tables[0]), len(tables[0]) * size
        prefix = CachedPrefix(tables, num_tokens, self._groups.num_passed(num_tokens))
        if host_ids := self.host.leading(keys[num_blocks:]):
            # No tail follows: a load could take it, and it may be a full block of the device.
            return prefix._replace(host_ids=host_ids, num_tokens=num_tokens + len(host_ids) * size)
        tail = self._pool.tails.after(keys[num_blocks - 1]) if num_blocks else None
        # Blocks of a tail of which only some are held can neither be reused nor just be copied.
        if tail is None or len(set(map(self._pool.is_free, tail.block_ids))) > 1:
            return prefix
        end = min(num_tokens + size, sequence.num_tokens - 1)
        num_shared = tail.num_common(sequence.token_ids[num_tokens:end])
        return prefix._replace(tail=tail, num_tokens=num_tokens + num_shared) if num_shared else prefix

    def num_lacking(self, sequence: Sequence, prefix: CachedPrefix, *, num_spare: int, num_held: int = 0) -> int:
        """Return how many free blocks `try_hold` lacks; 0 or less if it would succeed."""
        lengths = self._groups.lengths(max(sequence.num_tokens, num_held), prefix.num_tokens)
        return self._num_lacking(lengths, prefix, prefix.held_blocks, num_spare)

    def _num_lacking(self, lengths: list[int], prefix: CachedPrefix, held: list[int], num_spare: int) -> int:
        num_new = sum(lengths) - len(lengths) * prefix.num_blocks
        num_idle = sum(map(self._pool.is_free, held))
        return num_new + num_idle + num_spare - self._pool.num_free

    def num_released_by(self, holders: Items[Sequence], prefix: CachedPrefix | None = None) -> int:
        """Return how many blocks would be free without `holders`, other than those of `prefix`."""
        held = Counter(block_id for holder in holders for block_id in (*holder.held_blocks, *holder.cow_sources))
        for block_id in prefix.held_blocks if prefix is not None else ():
            held.pop(block_id, None)
        return sum(self._pool.num_references(block_id) == count for block_id, count in held.items())

    def try_hold(self, sequence: Sequence, prefix: CachedPrefix, *, num_spare: int, num_held: int = 0) -> bool:
        """Give a sequence without blocks all blocks that its known tokens need, or change nothing and return False.

        Args:
            sequence: waiting.
            prefix: of `lookup`, since which no block was taken or released.
            num_spare: blocks that must stay free afterwards.
            num_held: tokens to reserve blocks for, if more than the sequence has: its longest possible output.
        """
        lengths = self._groups.lengths(max(sequence.num_tokens, num_held), prefix.num_tokens)
        held = prefix.held_blocks
        num_left = -self._num_lacking(lengths, prefix, held, num_spare)
        if num_left < 0:
            return False
        for block_id in held:
            self._pool.hold(block_id)
        self._pool.want(held)
        keys = sequence.block_hashes[prefix.num_blocks : prefix.num_blocks + len(prefix.host_ids)]
        # First: a block that is taken may be saved, and must not replace one of these.
        self.host.begin_load(keys, prefix.host_ids)
        loaded = [self._pool.take() for _ in prefix.host_ids]
        sources, blocks = ((), ())
        if prefix.tail is not None:
            num_shared = prefix.num_tokens % self.block_size or self.block_size
            sources, blocks = self._pool.continue_in(prefix.tail, num_shared, num_left)
        sequence.plan_copies(sources, list(zip(prefix.host_ids, loaded, strict=True)))
        tables = [[*table, *loaded, *blocks[number : number + 1]] for number, table in enumerate(prefix.tables)]
        for table, num_entries in zip(tables, lengths, strict=True):
            table += [self._pool.take() for _ in range(num_entries - len(table))]
        num_published = prefix.num_blocks if loaded else prefix.num_tokens // self.block_size
        sequence.hold(tables, self.block_size, num_passed=prefix.num_passed, num_published=num_published)
        self.num_pending_copies += sequence.has_pending_copies
        return True

    def try_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` the blocks it lacks to hold `num_tokens`, or change nothing and return False."""
        num_entries = blocks_needed(num_tokens, self.block_size)
        if sum([max(0, num_entries - len(table)) for table in sequence.tables]) > self._pool.num_free:
            return False
        sequence.grow(num_entries, self._pool.take, self.block_size)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Index the full computed blocks of `sequence`. Call only after the step that computed them has succeeded."""
        num_full, num_more = divmod(sequence.num_computed_tokens, self.block_size)
        if self._is_caching:
            sequence.extend_hashes(num_full, self.block_size)
            for index in range(sequence.num_published_blocks, num_full):
                block_ids = sequence.blocks_at(index)
                if self._pool.index.add(sequence.block_hashes[index], block_ids) and index:
                    self._put_tail(sequence, block_ids, index, self.block_size)
        sequence.note_published(num_full)
        if num_more:
            self._publish_tail(sequence)
        if self._groups.has_window:
            self._give_back_passed(sequence)

    def end_copy(self, sequence: Sequence) -> None:
        """Release the blocks that `sequence` copies from, after a step with its copies and loads has succeeded."""
        self.num_pending_copies -= sequence.has_pending_copies
        for block_id in sequence.cow_sources:
            self._pool.let_go(block_id)
        self.host.end_load(block for block, _ in sequence.loads)
        sequence.plan_copies((), ())

    def retract(self, sequence: Sequence) -> None:
        """Remove blocks with the contents of `sequence` from the prefix cache: they may be wrong."""
        for key in sequence.block_hashes:
            tail = self._pool.tails.after(key)
            for block_ids in (*self._pool.index.of_all_groups(key), *([tail.block_ids] if tail else [])):
                self._pool.forget(block_ids[0])
        sequence.note_published(0)
        self.host.forget(sequence.block_hashes)

    def release(self, sequence: Sequence, *, comes_back: bool = False) -> None:
        """Take the blocks of `sequence` back; if it comes back, they go to the host tier when they are used again.

        The last block comes first, so that a chain is reused from its end. Blocks that are not indexed are reused
        before all others.
        """
        if sequence.has_pending_copies:
            # It is unknown whether they were made.
            self.end_copy(sequence)
        else:
            self._publish_tail(sequence)
        held = sequence.held_blocks
        if comes_back:
            self._pool.want(held)
        for block_id in reversed(held):
            self._pool.let_go(block_id)
        sequence.drop_blocks()

    def check_invariants(self, holders: Iterable[Sequence]) -> None:
        """Check that every block is either free or held by exactly `holders`.

        Raises:
            AssertionError: an invariant is violated.
        """
        holders = list(holders)
        held = [0] * self.num_blocks
        for block_id in (block_id for holder in holders for block_id in (*holder.held_blocks, *holder.cow_sources)):
            held[block_id] += 1
        self._pool.check_invariants(held, self.block_size)
        self.host.check_invariants(Counter(block for holder in holders for block, _ in holder.loads))
        num_pending = sum(holder.has_pending_copies for holder in holders)
        assert num_pending == self.num_pending_copies, "the number of pending copies is wrong"
        for sequence in filter(lambda holder: holder.cow_sources, holders):
            for copy in sequence.blocks_at(sequence.num_computed_tokens // self.block_size):
                assert held[copy] == 1, "the destination of a pending copy has two holders"
                assert not self._pool.is_findable(copy), "the destination of a pending copy is indexed"

    def _give_back_passed(self, sequence: Sequence) -> None:
        """Take back the blocks of `sequence` that left the sliding window of the tokens that it has yet to compute."""
        first, num_passed = sequence.num_passed_blocks, self._groups.num_passed(sequence.num_computed_tokens)
        for index in range(first, num_passed):
            for table in sequence.tables[self._groups.tables[-1]]:
                self._pool.let_go(table[index])
        sequence.note_passed(max(first, num_passed))

    def _publish_tail(self, sequence: Sequence) -> None:
        """Index the last, partially filled block of `sequence` as the tail of the block before it.

        Does nothing if the sequence was retracted.
        """
        num_full, num_more = divmod(sequence.num_computed_tokens, self.block_size)
        if self._is_caching and num_more and num_full == sequence.num_published_blocks > 0:
            self._put_tail(sequence, sequence.blocks_at(num_full), num_full, num_more)

    def _put_tail(self, sequence: Sequence, block_ids: Entry, index: int, num_tokens: int) -> None:
        """Index `block_ids`, entry `index` of `sequence`, as the tail of the one before it if that is still indexed."""
        parent, start = sequence.block_hashes[index - 1], index * self.block_size
        if self._pool.index.find(parent) is not None:
            token_ids = sequence.token_ids[start : start + num_tokens]
            self._pool.put_tail(parent, SharedTail(block_ids, token_ids))
