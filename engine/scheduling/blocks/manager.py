"""Block tables of sequences: which blocks of the KV cache each one holds. Read `lookup`, `try_hold` and `publish`.

Knows nothing of tensors, text or queues. Only this module writes a sequence's `block_table`, `window_table`,
`num_slots`, `num_published_blocks`, `num_passed_blocks` and `cow_sources`.

`BlockPool` counts references and knows the free blocks. `PrefixIndex` finds the full blocks that a sequence begins
with: they are shared as they are. `SharedTails` finds the block after them, of which a sequence may need only the first
tokens. A free tail whose tokens all match is reused in place. Otherwise the tail is copied before the sequence's first
step (copy-on-write), and the tokens that follow overwrite the copy. Until a step with that copy has succeeded, the copy
is repeated in each step and its source keeps a reference.

In a model whose layers all have a sliding window, a sequence gives back the blocks that left the window, and a cached
prefix needs only the blocks in the window at its end. Block tables keep an entry for the others, which nothing reads.

In a model where only some layers have a window, these are divided into window groups, which have a block table each
besides that of the other layers (`ModelLimits.window_groups`). Their blocks are given back; a cached prefix needs all
blocks of the other layers, and those of the window groups in the window at its end. All come from one pool, so no group
lacks blocks that another has to spare. The window groups take, publish and give back blocks of one entry together.

Hot module: no logging; per sequence and step, work only when a block fills up or a new one is needed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Set
from collections.abc import Sequence as Items
from itertools import chain
from typing import NamedTuple

from sluice.engine.batch import BlockSave
from sluice.engine.executor import blocks_needed, window_entries
from sluice.engine.scheduling.blocks.host_tier import HostTier
from sluice.engine.scheduling.blocks.pool import BlockPool
from sluice.engine.scheduling.blocks.prefix_index import CachedPrefix, PrefixIndex, WindowIndex, extend_hashes
from sluice.engine.scheduling.blocks.shared_tails import SharedTail, SharedTails
from sluice.engine.sequence import Sequence

_ROOM_TO_COPY = 2
"""Free blocks required to copy a free tail instead of reusing it: the copy, and one block to grow into."""

_ANY = 0
"""The entry of a block table for a block before the sliding window."""


class WindowSizes(NamedTuple):
    """The sliding window of a model, and what it makes a sequence hold."""

    num_tokens: int
    """Tokens that a token attends to."""

    step_tokens: int
    """Maximum tokens of a step."""

    num_groups: int = 0
    """Window groups; 0: all layers have the window, and one table."""


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
        self.block_size = block_size
        self._window = window
        self._num_groups = window.num_groups if window is not None else 0
        self._is_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(num_blocks)
        self._windows = WindowIndex(num_blocks if self._num_groups else 0)
        self._tails = SharedTails(num_blocks)
        self._host = HostTier(num_host_blocks) if num_host_blocks and window is None else None
        self._is_wanted = bytearray(num_blocks)
        """Whether a block's contents were found again, or those of a preempted sequence. Only these are saved."""

        self.num_pending_copies = 0
        """Sequences with pending copies or loads."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference, indexed or not."""
        return self._pool.num_free

    @property
    def num_free_entries(self) -> int:
        """Entries of the block tables that the free blocks are enough for."""
        return self._pool.num_free // (1 + self._num_groups)

    def lookup(self, sequence: Sequence) -> CachedPrefix:
        """Return the cached blocks that a waiting `sequence` begins with; its last token must yield logits."""
        if not self._is_caching:
            return CachedPrefix([], None, 0)
        size = self.block_size
        num_full = (sequence.num_tokens - 1) // size
        extend_hashes(sequence, num_full, size)
        found = self._cached_blocks(sequence.block_hashes[:num_full])
        num_known, num_tokens = len(found.block_ids), found.num_tokens
        if self._host is not None and (host_ids := self._host.leading(sequence.block_hashes[num_known:num_full])):
            # No tail follows: a load could take it, and it may be a full block of the device.
            return found._replace(host_ids=host_ids, num_tokens=num_tokens + len(host_ids) * size)
        tail = self._tails.after(sequence.block_hashes[num_known - 1]) if num_known else None
        if tail is None or self._is_half_free(tail):
            return found
        end = min(num_tokens + size, sequence.num_tokens - 1)
        num_shared = tail.num_common(sequence.token_ids[num_tokens:end])
        return found._replace(tail=tail, num_tokens=num_tokens + num_shared) if num_shared else found

    def try_hold(self, sequence: Sequence, found: CachedPrefix, *, num_spare: int, num_held: int = 0) -> bool:
        """Give a sequence without blocks all blocks that its known tokens need, or change nothing and return False.

        Of layers with a sliding window, these are the blocks of one window and one step: later steps give back as many
        as they take.

        Args:
            sequence: waiting, with an empty block table.
            found: of `lookup`, since which no block was taken or released.
            num_spare: blocks that must stay free afterwards.
            num_held: tokens to reserve blocks for, if more than the sequence has: its longest possible output.
        """
        num_left = -self.num_lacking(sequence, found, num_spare=num_spare, num_held=num_held)
        if num_left < 0:
            return False
        num_full, num_windowed = self._num_entries(sequence, found, num_held)
        for block_id in found.held_ids:
            self._pool.hold(block_id)
            self._is_wanted[block_id] = True
        known = found.block_ids
        loaded = self._load(sequence, len(known), found.host_ids)
        shared = self._continue_in(sequence, found, num_left) if found.tail is not None else ()
        table = [*known, *loaded, *shared[:1]]
        sequence.block_table = table + [self._take() for _ in range(num_full - len(table))]
        if self._num_groups:
            sequence.window_table = self._window_table(found, shared[1:], num_windowed)
        sequence.num_slots = len(sequence.window_table or sequence.block_table) * self.block_size
        sequence.num_published_blocks = len(known) if loaded else found.num_tokens // self.block_size
        sequence.num_passed_blocks = found.num_passed
        self.num_pending_copies += sequence.has_pending_copies
        return True

    def num_lacking(self, sequence: Sequence, found: CachedPrefix, *, num_spare: int, num_held: int = 0) -> int:
        """Return how many free blocks `try_hold` lacks; 0 or less if it would succeed."""
        num_known = len(found.block_ids)
        num_full, num_windowed = self._num_entries(sequence, found, num_held)
        num_new = num_full - num_known + self._num_groups * (num_windowed - num_known)
        num_idle = sum(map(self._pool.is_free, found.held_ids))
        return num_new + num_idle + num_spare - self._pool.num_free

    def num_released_by(self, holders: Items[Sequence], found: CachedPrefix) -> int:
        """Return how many blocks would be free without `holders`, other than those of `found`."""
        held = Counter(block_id for sequence in holders for block_id in _held_by(sequence))
        held.update(block_id for one in holders for block_id in one.cow_sources)
        for block_id in found.held_ids:
            held.pop(block_id, None)
        return sum(self._pool.num_references(block_id) == count for block_id, count in held.items())

    def try_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` the blocks it lacks to hold `num_tokens`, or change nothing and return False."""
        num_entries = blocks_needed(num_tokens, self.block_size)
        if self._num_groups:
            return self._try_grow_all(sequence, num_entries)
        num_new = num_entries - len(sequence.block_table)
        if num_new > self._pool.num_free:
            return False
        for _ in range(num_new):
            sequence.block_table.append(self._take())
        sequence.num_slots = len(sequence.block_table) * self.block_size
        return True

    def publish(self, sequence: Sequence) -> None:
        """Index the full computed blocks of `sequence`. Call only after the step that computed them has succeeded."""
        num_full = sequence.num_computed_tokens // self.block_size
        if self._is_caching:
            extend_hashes(sequence, num_full, self.block_size)
            for index in range(sequence.num_published_blocks, num_full):
                self._publish_full(sequence, index)
        sequence.num_published_blocks = num_full
        self._publish_last(sequence)
        self._give_back_passed(sequence)

    def end_copy(self, sequence: Sequence) -> None:
        """Release what `sequence` copies from. Call only after a step with its copies and loads has succeeded."""
        self.num_pending_copies -= sequence.has_pending_copies
        for block_id in sequence.cow_sources:
            self._let_go(block_id)
        sequence.cow_sources = ()
        if sequence.loads and self._host is not None:
            self._host.end_load(block for block, _ in sequence.loads)
            sequence.loads = []

    def saves(self, filled: Callable[[], Set[int]]) -> tuple[BlockSave, ...]:
        """Return what the next step saves to the host tier; see `HostTier.saves`."""
        return self._host.saves(filled) if self._host is not None else ()

    def confirm_saves(self, saves: Iterable[BlockSave]) -> None:
        """Let `saves` be found. Call only after a step with them has succeeded."""
        if self._host is not None:
            self._host.confirm(saves)

    def give_up_saves(self) -> None:
        """Save nothing of what no step has saved: memory is short."""
        if self._host is not None:
            self._host.give_up_saves()

    def want(self, sequence: Sequence) -> None:
        """Note that `sequence` will come back: its blocks are saved to the host tier when they are taken."""
        if self._host is not None:
            for block_id in sequence.block_table:
                self._is_wanted[block_id] = True

    def retract(self, sequence: Sequence) -> None:
        """Remove the blocks of `sequence` from the prefix index: their content may be wrong."""
        for block_id in _held_by(sequence):
            self._forget(block_id)
        for key in sequence.block_hashes[: sequence.num_passed_blocks]:
            passed = self._windows.find(key) or (self._index.find(key),)
            if passed[0] is not None:
                self._forget(passed[0])
        for key in sequence.block_hashes:
            tail = self._tails.after(key)
            if tail is not None:
                self._tails.forget(tail.block_id)
        sequence.num_published_blocks = 0
        if self._host is not None:
            self._host.forget(sequence.block_hashes)

    def release(self, sequence: Sequence) -> None:
        """Take the blocks of `sequence` back.

        The last block comes first, so that a chain is reused from its end. Blocks that are not indexed are reused
        before all others.
        """
        if sequence.has_pending_copies:
            # It is unknown whether they were made.
            self.end_copy(sequence)
        else:
            self._publish_last(sequence)
        for block_id in reversed(_held_by(sequence)):
            self._let_go(block_id)
        # A new list: a step in flight may still read the old one.
        sequence.block_table = []
        sequence.window_table = []
        sequence.num_slots = 0
        sequence.num_published_blocks = 0
        sequence.num_passed_blocks = 0

    def check_invariants(self, holders: Iterable[Sequence]) -> None:
        """Check that every block is either free or held by exactly `holders`.

        Raises:
            AssertionError: an invariant is violated.
        """
        held = [0] * self._pool.num_blocks
        copying: list[Sequence] = []
        num_pending, num_loads = 0, Counter[int]()
        for sequence in holders:
            for block_id in _held_by(sequence):
                held[block_id] += 1
            for block_id in sequence.cow_sources:
                held[block_id] += 1
            if sequence.cow_sources:
                copying.append(sequence)
            num_pending += sequence.has_pending_copies
            num_loads.update(block for block, _ in sequence.loads)
        self._pool.check_invariants(held)
        self._index.check_invariants()
        self._windows.check_invariants()
        full_tails = self._tails.check_invariants(self.block_size)
        assert all(map(self._index.has, full_tails)), "a full tail is not indexed by its hash"
        assert num_pending == self.num_pending_copies, "the number of pending copies is wrong"
        if self._host is not None:
            self._host.check_invariants(num_loads)
        for sequence in copying:
            for copy in sequence.blocks_at(sequence.num_computed_tokens // self.block_size):
                assert held[copy] == 1, "the destination of a pending copy has two holders"
                assert not self._is_findable(copy), "the destination of a pending copy is indexed"

    def _num_entries(self, sequence: Sequence, found: CachedPrefix, num_held: int) -> tuple[int, int]:
        """Return how many entries `block_table` and `window_table` of `sequence` have when it joins with `found`.

        Without window groups the second number is that of `found`: it has no such table.
        """
        size, num_tokens = self.block_size, max(sequence.num_tokens, num_held)
        if self._window is None:
            return blocks_needed(num_tokens, size), len(found.block_ids)
        most = self._num_passed(found.num_tokens) + window_entries(
            self._window.num_tokens, self._window.step_tokens, size
        )
        num_windowed = min(blocks_needed(num_tokens, size), most)
        if not self._num_groups:
            return num_windowed, len(found.block_ids)
        return blocks_needed(num_tokens, size), num_windowed

    def _window_table(self, found: CachedPrefix, tail: tuple[int, ...], num_entries: int) -> list[tuple[int, ...]]:
        """Return a table of the window groups that begins with `found`, whose tail or a copy of it is `tail`."""
        table = [(_ANY,) * self._num_groups] * found.num_passed + [*(found.window_ids or ())]
        if tail:
            table.append(tail)
        return table + [self._take_entry() for _ in range(num_entries - len(table))]

    def _try_grow_all(self, sequence: Sequence, num_entries: int) -> bool:
        """Do `try_grow` in a model with window groups."""
        num_new = max(0, num_entries - len(sequence.block_table))
        num_windowed = max(0, num_entries - len(sequence.window_table))
        if num_new + self._num_groups * num_windowed > self._pool.num_free:
            return False
        sequence.block_table += [self._take() for _ in range(num_new)]
        sequence.window_table += [self._take_entry() for _ in range(num_windowed)]
        sequence.num_slots = len(sequence.window_table) * self.block_size
        return True

    def _cached_blocks(self, keys: list[int]) -> CachedPrefix:
        """Return the longest cached prefix of `keys`, in full blocks of the device."""
        size = self.block_size
        if self._num_groups:
            known = self._index.leading(keys)
            num_known = self._num_in_window(keys[: len(known)], self._windows)
            num_passed = self._num_passed(num_known * size)
            windowed = [self._windows.find(key) for key in keys[num_passed:num_known]]
            return CachedPrefix(known[:num_known], None, num_known * size, num_passed, window_ids=windowed)
        if self._window is None:
            known = self._index.leading(keys)
            return CachedPrefix(known, None, len(known) * size)
        num_known = self._num_in_window(keys, self._index)
        num_passed = self._num_passed(num_known * size)
        known = [_ANY] * num_passed + self._index.leading(keys[num_passed:num_known])
        return CachedPrefix(known, None, num_known * size, num_passed)

    def _num_in_window(self, keys: list[int], index: PrefixIndex | WindowIndex) -> int:
        """Return the length of the longest prefix of `keys` of which `index` has what is in the window at its end."""
        num_known = num_checked = len(keys)
        while num_checked > self._num_passed(num_known * self.block_size):
            num_checked -= 1
            if keys[num_checked] not in index:
                num_known = num_checked
        return num_known

    def _num_passed(self, num_computed_tokens: int) -> int:
        """Return how many leading entries the token after the computed ones, and all later ones, do not attend to."""
        if self._window is None:
            return 0
        return max(0, num_computed_tokens - self._window.num_tokens + 1) // self.block_size

    def _give_back_passed(self, sequence: Sequence) -> None:
        """Take back the blocks of `sequence` that left the sliding window of the tokens it has yet to compute."""
        first, num_passed = sequence.num_passed_blocks, self._num_passed(sequence.num_computed_tokens)
        if num_passed <= first:
            return
        if self._num_groups:
            passed = chain.from_iterable(sequence.window_table[first:num_passed])
        else:
            passed = sequence.block_table[first:num_passed]
        for block_id in passed:
            self._let_go(block_id)
        sequence.num_passed_blocks = num_passed

    def _is_half_free(self, tail: SharedTail) -> bool:
        """Whether some blocks of `tail` are held and others are free: they can neither be reused nor just be copied."""
        return len(set(map(self._pool.is_free, tail.block_ids))) > 1

    def _continue_in(self, sequence: Sequence, found: CachedPrefix, num_left: int) -> tuple[int, ...]:
        """Return the blocks in which `sequence` continues: those of the tail of `found`, or others to copy them to.

        The tail is reused in place if it is free and none of its tokens are lost, or if there is no room to keep it.
        """
        assert found.tail is not None, "there is nothing to continue in"
        block_ids, num_shared = found.tail.block_ids, found.num_tokens % self.block_size or self.block_size
        is_over = not any(map(self._is_full, block_ids)) and num_shared == len(found.tail.token_ids)
        has_room = num_left >= _ROOM_TO_COPY * len(block_ids)
        is_reused = self._pool.is_free(block_ids[0]) and (is_over or not has_room)
        for block_id in block_ids:
            self._pool.hold(block_id)
        if is_reused:
            for block_id in block_ids:
                self._forget_full(block_id)
            self._tails.shorten(block_ids[0], num_shared)
            return block_ids
        sequence.cow_sources = block_ids
        return tuple(self._take() for _ in block_ids)

    def _publish_full(self, sequence: Sequence, index: int) -> None:
        """Index entry `index` of `sequence` by its hash, and as the tail of the one before it."""
        key, (block_id, *windowed) = sequence.block_hashes[index], sequence.blocks_at(index)
        is_new = self._index.add(key, block_id)
        if windowed:
            is_new = self._windows.add(key, tuple(windowed)) and is_new
        if is_new and index and (parent := sequence.block_hashes[index - 1]) in self._index:
            start = index * self.block_size
            token_ids = sequence.token_ids[start : start + self.block_size]
            self._put_tail(parent, SharedTail(block_id, token_ids, tuple(windowed)))

    def _publish_last(self, sequence: Sequence) -> None:
        """Index the last, partially filled block of `sequence` as the tail of the block before it.

        Does nothing if the sequence, or another one that shares its prefix, was retracted.
        """
        num_full, num_more = divmod(sequence.num_computed_tokens, self.block_size)
        is_findable = self._is_caching and num_full == sequence.num_published_blocks > 0
        if num_more == 0 or not is_findable:
            return
        key = sequence.block_hashes[num_full - 1]
        if key in self._index:
            block_id, *windowed = sequence.blocks_at(num_full)
            token_ids = sequence.token_ids[num_full * self.block_size : sequence.num_computed_tokens]
            self._put_tail(key, SharedTail(block_id, token_ids, tuple(windowed)))

    def _put_tail(self, key: int, tail: SharedTail) -> None:
        for replaced in self._tails.put(key, tail):
            if not self._is_findable(replaced):
                self._pool.reuse_first(replaced)

    def _load(self, sequence: Sequence, num_known: int, host_ids: Items[int]) -> list[int]:
        """Return blocks for `host_ids`, which follow the first `num_known` blocks of `sequence`."""
        if not host_ids or self._host is None:
            return []
        # First: a block that is taken may be saved, and must not replace one of these.
        self._host.begin_load(sequence.block_hashes[num_known : num_known + len(host_ids)], host_ids)
        taken = [self._take() for _ in host_ids]
        sequence.loads = list(zip(host_ids, taken, strict=True))
        return taken

    def _take(self) -> int:
        block_id = self._pool.take()
        if self._host is not None:
            key = self._index.key_of(block_id)
            if key is not None and self._is_wanted[block_id]:
                self._host.save(key, block_id)
            self._is_wanted[block_id] = False
        self._forget(block_id)
        return block_id

    def _take_entry(self) -> tuple[int, ...]:
        """Take a block for each window group."""
        return tuple(self._take() for _ in range(self._num_groups))

    def _let_go(self, block_id: int) -> None:
        self._pool.let_go(block_id, is_useful=self._is_findable(block_id))

    def _forget(self, block_id: int) -> None:
        self._forget_full(block_id)
        self._tails.forget(block_id)

    def _forget_full(self, block_id: int) -> None:
        self._index.forget(block_id)
        if self._num_groups:
            # What is left of the entry is of no use.
            for other in self._windows.forget(block_id):
                self._pool.reuse_first(other)

    def _is_full(self, block_id: int) -> bool:
        """Whether `block_id` is indexed by its hash."""
        return self._index.has(block_id) or (self._num_groups > 0 and self._windows.has(block_id))

    def _is_findable(self, block_id: int) -> bool:
        return self._is_full(block_id) or self._tails.has(block_id)


def _held_by(sequence: Sequence) -> list[int]:
    """Return the blocks of `sequence`'s tables that it holds, in token order."""
    table, num_passed, num_windowed = sequence.block_table, sequence.num_passed_blocks, len(sequence.window_table)
    if not num_windowed:
        return table[num_passed:] if num_passed else table
    in_window = chain.from_iterable(map(sequence.blocks_at, range(num_passed, num_windowed)))
    return [*table[:num_passed], *in_window, *table[num_windowed:]]
