"""Any sequence of allocations, growth, publishing and releases keeps counts consistent and the cache correct."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.engine.executor import blocks_needed
from sluice.engine.request import Sampling
from sluice.engine.scheduling.blocks.manager import BlockManager, CachedPrefix
from sluice.engine.scheduling.blocks.windows import WindowSizes
from sluice.engine.sequence import Sequence
from tests.examples import examples

BLOCK_SIZE = 3
NUM_BLOCKS = 7
NUM_WINDOW_BLOCKS = 3
"""More for each window group: so few that blocks are soon used again."""

Content = tuple[int, str, tuple[int, ...]]
"""The table that a slot is of, the salt, and all tokens up to the slot's own."""

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences over two tokens and two salts, so that prefixes meet often."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []
        self.contents: dict[int, Content] = {}
        """What was computed into each slot."""

    @initialize(window=st.sampled_from([0, 0, 1, 4]), groups=st.sampled_from([0, 1, 2]))
    def start(self, window: int, groups: int) -> None:
        self.window, self.groups = window, groups if window else 0
        self.manager = BlockManager(
            NUM_BLOCKS + self.groups * NUM_WINDOW_BLOCKS,
            BLOCK_SIZE,
            enable_prefix_caching=True,
            window=WindowSizes(window, 4, groups) if window else None,
        )

    @rule(token_ids=tokens, salt=st.sampled_from(["", "s"]), num_spare=st.integers(0, 2))
    def hold(self, token_ids: list[int], salt: str, num_spare: int) -> None:
        sequence = self.sequence(token_ids, salt)
        num_free = self.manager.num_free_blocks

        found = self.manager.lookup(sequence)
        is_held = self.manager.try_hold(sequence, found, num_spare=num_spare)

        if not is_held:
            assert not any(sequence.tables)
            assert self.manager.num_free_blocks == num_free
            num_needed = blocks_needed(len(token_ids), BLOCK_SIZE) * (1 + self.groups)
            assert num_needed + num_spare > num_free - found.num_blocks
            return
        assert found.num_tokens < len(token_ids)
        assert self.manager.num_free_blocks >= num_spare
        sequence.num_computed_tokens = found.num_tokens
        self.sequences.append(sequence)

    @precondition(lambda self: bool(self.sequences))
    @rule(data=st.data(), new=tokens)
    def grow(self, data: st.DataObject, new: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        before = [list(table) for table in sequence.tables]

        if self.manager.try_grow(sequence, sequence.num_tokens + len(new)):
            sequence.token_ids += new
        else:
            assert sequence.tables == before

    @precondition(lambda self: bool(self.sequences))
    @rule(data=st.data())
    def compute_and_publish(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        start = sequence.num_computed_tokens
        end = data.draw(st.integers(start, min(sequence.num_tokens, sequence.num_slots)))
        if end == start:
            return
        self.copy(sequence)
        for number, table in enumerate(self.tables(sequence)):
            for position in range(start, end):
                self.contents[self.slot(table, position)] = self.content(sequence, position, number)

        self.manager.end_copy(sequence)
        sequence.num_computed_tokens = end
        self.manager.publish(sequence)

    @precondition(lambda self: bool(self.sequences))
    @rule(data=st.data())
    def fail_after_writing(self, data: st.DataObject) -> None:
        """A step whose results may not be used: it may be retried."""
        sequence = data.draw(st.sampled_from(self.sequences))
        self.copy(sequence)
        for position in range(sequence.num_computed_tokens, min(sequence.num_tokens, sequence.num_slots)):
            for table in self.tables(sequence):
                self.contents[self.slot(table, position)] = (0, "failed", ())

    @precondition(lambda self: bool(self.sequences))
    @rule(data=st.data(), is_suspect=st.booleans())
    def release(self, data: st.DataObject, is_suspect: bool) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if is_suspect:
            self.manager.retract(sequence)

        self.manager.release(sequence)

        self.sequences.remove(sequence)
        assert sequence.num_slots == 0

    @invariant()
    def every_block_is_either_free_or_held(self) -> None:
        self.manager.check_invariants(self.sequences)

    @invariant()
    def what_is_computed_is_what_its_blocks_hold(self) -> None:
        for sequence in self.sequences:
            assert self.window or sequence.num_slots >= sequence.num_tokens
            # The next token attends to itself and to those before it in the window.
            first_read = max(0, sequence.num_computed_tokens - self.window + 1) if self.window else 0
            assert sequence.num_passed_blocks * BLOCK_SIZE <= first_read
            for number, table in enumerate(self.tables(sequence, before_copies=True)):
                for position in self.read(number, sequence.num_passed_blocks, sequence.num_computed_tokens):
                    assert self.contents[self.slot(table, position)] == self.content(sequence, position, number)

    @invariant()
    def what_is_found_is_what_was_computed(self) -> None:
        begun = [self.sequence(one.token_ids[: one.num_tokens // 2 + 1], one.cache_salt) for one in self.sequences]
        for sequence in (*self.sequences, *begun):
            found = self.manager.lookup(sequence)
            assert len(found.tables) == 1 + self.groups
            assert not self.window or found.num_passed * BLOCK_SIZE <= max(0, found.num_tokens - self.window + 1)
            for number, table in enumerate(self.tables_of(found)):
                for position in self.read(number, found.num_passed, found.num_tokens):
                    assert self.contents[self.slot(table, position)] == self.content(sequence, position, number)

    def sequence(self, token_ids: list[int], salt: str) -> Sequence:
        return Sequence(
            id=len(self.sequences),
            request_id="r",
            choice=0,
            sampling=Sampling(),
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            cache_salt=salt,
        )

    def read(self, number: int, num_passed: int, num_tokens: int) -> range:
        """The positions that layers of table `number` read."""
        is_windowed = number > 0 or not self.groups
        return range(num_passed * BLOCK_SIZE if is_windowed else 0, num_tokens)

    @staticmethod
    def tables(sequence: Sequence, *, before_copies: bool = False) -> list[list[int]]:
        """Its block tables, with the sources in the places of copies that are not made, if these are asked for."""
        tables = sequence.tables
        index = sequence.num_computed_tokens // BLOCK_SIZE
        if not (before_copies and sequence.cow_sources):
            return tables
        pairs = zip(tables, sequence.cow_sources, strict=True)
        return [[*table[:index], source, *table[index + 1 :]] for table, source in pairs]

    @staticmethod
    def tables_of(found: CachedPrefix) -> list[list[int]]:
        """The block tables of a cached prefix, with its tail."""
        if found.tail is None:
            return found.tables
        return [[*table, block_id] for table, block_id in zip(found.tables, found.tail.block_ids, strict=True)]

    def copy(self, sequence: Sequence) -> None:
        """The copies at the start of a step: they may be made, fail, and be made again."""
        if not sequence.cow_sources:
            return
        destinations = sequence.blocks_at(sequence.num_computed_tokens // BLOCK_SIZE)
        for source, destination in zip(sequence.cow_sources, destinations, strict=True):
            for offset in range(BLOCK_SIZE):
                found = self.contents.get(source * BLOCK_SIZE + offset, (0, "never written", ()))
                self.contents[destination * BLOCK_SIZE + offset] = found

    @staticmethod
    def slot(block_ids: list[int], position: int) -> int:
        return block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    @staticmethod
    def content(sequence: Sequence, position: int, number: int) -> Content:
        return number, sequence.cache_salt, tuple(sequence.token_ids[: position + 1])


BlockManagerMachine.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestBlockManagerMachine = BlockManagerMachine.TestCase
