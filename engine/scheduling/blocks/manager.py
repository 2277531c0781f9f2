"""Block tables of sequences: which blocks of the KV cache each one holds. Read `lookup`, `try_hold` and `publish`.

Knows nothing of tensors, text or queues.

`BlockPool` counts references, and knows the free blocks and what blocks contain. Full blocks that a sequence begins
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
from sluice.engine.scheduling.blocks.windows import WindowSizes, table_groups
from sluice.engine.sequence import Sequence, held_blocks

_ROOM_TO_COPY = 2
"""Free blocks required to copy a free tail instead of reusing it: the copy, and one block to grow into."""


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
        self._groups = table_groups(block_size, window)
        self._num_tables = sum(group.num_tables for group in self._groups)
        self._pool = BlockPool(num_blocks, len(self._groups), self.host)
        self.num_pending_copies = 0
        """Sequences with pending copies or loads."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference, indexed or not."""
        return self._pool.num_free

    def lookup(self, sequence: Sequence) -> CachedPrefix:
        """Return the cached blocks that a waiting `sequence` begins with; its last token must yield logits."""
        if not self._is_caching:
            return CachedPrefix([[] for _ in range(self._num_tables)])
        size, num_full = self.block_size, (sequence.num_tokens - 1) // self.block_size
        sequence.extend_hashes(num_full, size)
        found = self._full_blocks(sequence.block_hashes[:num_full])
        num_tokens = found.num_tokens
        if host_ids := self.host.leading(sequence.block_hashes[found.num_blocks : num_full]):
            # No tail follows: a load could take it, and it may be a full block of the device.
            return found._replace(host_ids=host_ids, num_tokens=num_tokens + len(host_ids) * size)
        tail = self._pool.tails.after(sequence.block_hashes[found.num_blocks - 1]) if found.num_blocks else None
        # Blocks of a tail of which only some are held can neither be reused nor just be copied.
        if tail is None or len(set(map(self._pool.is_free, tail.block_ids))) > 1:
            return found
        end = min(num_tokens + size, sequence.num_tokens - 1)
        num_shared = tail.num_common(sequence.token_ids[num_tokens:end])
        return found._replace(tail=tail, num_tokens=num_tokens + num_shared) if num_shared else found

    def num_lacking(self, sequence: Sequence, found: CachedPrefix, *, num_spare: int, num_held: int = 0) -> int:
        """Return how many free blocks `try_hold` lacks; 0 or less if it would succeed."""
        num_new = sum(num_entries - found.num_blocks for num_entries in self._lengths(sequence, found, num_held))
        num_idle = sum(map(self._pool.is_free, found.held_blocks))
        return num_new + num_idle + num_spare - self._pool.num_free

    def num_released_by(self, holders: Items[Sequence], found: CachedPrefix) -> int:
        """Return how many blocks would be free without `holders`, other than those of `found`."""
        held = Counter(block_id for one in holders for block_id in (*one.held_blocks, *one.cow_sources))
        for block_id in found.held_blocks:
            held.pop(block_id, None)
        return sum(self._pool.num_references(block_id) == count for block_id, count in held.items())

    def try_hold(self, sequence: Sequence, found: CachedPrefix, *, num_spare: int, num_held: int = 0) -> bool:
        """Give a sequence without blocks all blocks that its known tokens need, or change nothing and return False.

        Args:
            sequence: waiting.
            found: of `lookup`, since which no block was taken or released.
            num_spare: blocks that must stay free afterwards.
            num_held: tokens to reserve blocks for, if more than the sequence has: its longest possible output.
        """
        num_left = -self.num_lacking(sequence, found, num_spare=num_spare, num_held=num_held)
        if num_left < 0:
            return False
        for block_id in (held := found.held_blocks):
            self._pool.hold(block_id)
        self._pool.want(held)
        keys = sequence.block_hashes[found.num_blocks : found.num_blocks + len(found.host_ids)]
        # First: a block that is taken may be saved, and must not replace one of these.
        self.host.begin_load(keys, found.host_ids)
        loaded = [self._pool.take() for _ in found.host_ids]
        sources, copies = self._continue_in(found.tail, found.num_tokens, num_left) if found.tail else ((), ())
        sequence.plan_copies(sources, list(zip(found.host_ids, loaded, strict=True)))
        tables = [[*table, *loaded, *copies[number : number + 1]] for number, table in enumerate(found.tables)]
        for table, num_entries in zip(tables, self._lengths(sequence, found, num_held), strict=True):
            table += [self._pool.take() for _ in range(num_entries - len(table))]
        num_published = found.num_blocks if loaded else found.num_tokens // self.block_size
        sequence.hold(tables, self.block_size, num_passed=found.num_passed, num_published=num_published)
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
        num_full = sequence.num_computed_tokens // self.block_size
        if self._is_caching:
            sequence.extend_hashes(num_full, self.block_size)
            for index in range(sequence.num_published_blocks, num_full):
                self._publish_full(sequence, index)
        first, num_passed = sequence.num_passed_blocks, self._groups[-1].num_passed(sequence.num_computed_tokens)
        sequence.note_published(num_full, max(first, num_passed))
        self._publish_tail(sequence)
        for index in range(first, num_passed):
            for table in sequence.tables[self._groups[-1].tables]:
                self._pool.let_go(table[index])

    def end_copy(self, sequence: Sequence) -> None:
        """Release what `sequence` copies from. Call only after a step with its copies and loads has succeeded."""
        self.num_pending_copies -= sequence.has_pending_copies
        for block_id in sequence.cow_sources:
            self._pool.let_go(block_id)
        self.host.end_load(block for block, _ in sequence.loads)
        sequence.plan_copies((), ())

    def retract(self, sequence: Sequence) -> None:
        """Remove what has the contents of `sequence` from the prefix cache: it may be wrong."""
        for key in sequence.block_hashes:
            entries = [self._pool.index.find(key, group.number) for group in self._groups]
            tail = self._pool.tails.after(key)
            for block_ids in (*entries, tail and tail.block_ids):
                if block_ids is not None:
                    self._pool.forget(block_ids[0])
        sequence.note_published(0, sequence.num_passed_blocks)
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
        for block_id in (block_id for one in holders for block_id in (*one.held_blocks, *one.cow_sources)):
            held[block_id] += 1
        self._pool.check_invariants(held, self.block_size)
        self.host.check_invariants(Counter(block for one in holders for block, _ in one.loads))
        num_pending = sum(one.has_pending_copies for one in holders)
        assert num_pending == self.num_pending_copies, "the number of pending copies is wrong"
        for sequence in (one for one in holders if one.cow_sources):
            for copy in sequence.blocks_at(sequence.num_computed_tokens // self.block_size):
                assert held[copy] == 1, "the destination of a pending copy has two holders"
                assert not self._pool.is_findable(copy), "the destination of a pending copy is indexed"

    def _lengths(self, sequence: Sequence, found: CachedPrefix, num_held: int) -> list[int]:
        """Return how many entries each block table of `sequence` has when it joins with `found`."""
        num_tokens = max(sequence.num_tokens, num_held)
        return [
            group.num_entries(num_tokens, found.num_tokens) for group in self._groups for _ in range(group.num_tables)
        ]

    def _full_blocks(self, keys: list[int]) -> CachedPrefix:
        """Return the longest cached prefix of `keys`, in full blocks of the device."""
        found: list[list[Entry]] = []
        for group in self._groups:
            found.append(group.cached(keys, self._pool.index))
            keys = keys[: len(found[-1])]
        tables = [
            [entry[place] for entry in entries[: len(keys)]]
            for group, entries in zip(self._groups, found, strict=True)
            for place in range(group.num_tables)
        ]
        num_tokens = len(keys) * self.block_size
        return CachedPrefix(tables, num_tokens, self._groups[-1].num_passed(num_tokens))

    def _continue_in(self, tail: SharedTail, num_cached_tokens: int, num_left: int) -> tuple[Entry, Entry]:
        """Return the blocks to copy, and those in which a sequence continues: copies of `tail`, or the tail itself.

        The tail is reused in place if it is free and none of its tokens are lost, or if there is no room to keep it.
        """
        block_ids, num_shared = tail.block_ids, num_cached_tokens % self.block_size or self.block_size
        is_over = not any(map(self._pool.index.has, block_ids)) and num_shared == len(tail.token_ids)
        has_room = num_left >= _ROOM_TO_COPY * len(block_ids)
        is_reused = self._pool.is_free(block_ids[0]) and (is_over or not has_room)
        for block_id in block_ids:
            self._pool.hold(block_id)
        if not is_reused:
            return block_ids, tuple([self._pool.take() for _ in block_ids])
        for block_id in block_ids:
            self._pool.forget_full(block_id)
        self._pool.tails.shorten(block_ids[0], num_shared)
        return (), block_ids

    def _publish_full(self, sequence: Sequence, index: int) -> None:
        """Index entry `index` of `sequence` by its hash, and as the tail of the one before it."""
        block_ids, key = sequence.blocks_at(index), sequence.block_hashes[index]
        is_new = True
        for group in self._groups:
            is_new &= self._pool.index.add(key, block_ids[group.tables], group.number)
        if is_new and index:
            self._put_tail(sequence, block_ids, index, self.block_size)

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
