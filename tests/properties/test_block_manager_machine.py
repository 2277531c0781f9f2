"""Any sequence of allocations, growth, publishing and releases keeps counts consistent and the cache correct."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice.engine.request import SamplingParams
from sluice.engine.scheduling.block_manager import BlockManager, blocks_needed
from sluice.engine.sequence import Sequence

BLOCK_SIZE = 3
NUM_BLOCKS = 7

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences over two tokens and two salts, so that prefixes meet often."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True)
        self.sequences: list[Sequence] = []
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}
        """What was computed into each slot: the salt and all tokens up to its own."""

    @rule(token_ids=tokens, salt=st.sampled_from(["", "s"]), num_spare=st.integers(0, 2))
    def hold(self, token_ids: list[int], salt: str, num_spare: int) -> None:
        sequence = Sequence(
            id=len(self.sequences),
            request_id="r",
            choice=0,
            sampling=SamplingParams(),
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            cache_salt=salt,
        )
        num_free = self.manager.num_free_blocks

        found = self.manager.lookup(sequence)
        is_held = self.manager.try_hold(sequence, found, num_spare=num_spare)

        if not is_held:
            assert (sequence.block_table, self.manager.num_free_blocks) == ([], num_free)
            assert blocks_needed(len(token_ids), BLOCK_SIZE) + num_spare > num_free - len(found.block_ids)
            return
        assert found.num_tokens < len(token_ids)
        assert self.manager.num_free_blocks >= num_spare
        sequence.num_computed_tokens = found.num_tokens
        self.sequences.append(sequence)

    @precondition(lambda self: bool(self.sequences))
    @rule(data=st.data(), new=tokens)
    def grow(self, data: st.DataObject, new: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        before = list(sequence.block_table)

        if self.manager.try_grow(sequence, sequence.num_tokens + len(new)):
            sequence.token_ids += new
        else:
            assert sequence.block_table == before

    @precondition(lambda self: bool(self.sequences))
    @rule(data=st.data())
    def compute_and_publish(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        start = sequence.num_computed_tokens
        end = data.draw(st.integers(start, sequence.num_tokens))
        if end == start:
            return
        self.copy(sequence)
        for position in range(start, end):
            self.contents[self.slot(sequence.block_table, position)] = self.content(sequence, position)

        self.manager.end_copy(sequence)
        sequence.num_computed_tokens = end
        self.manager.publish(sequence)

    @precondition(lambda self: bool(self.sequences))
    @rule(data=st.data())
    def fail_after_writing(self, data: st.DataObject) -> None:
        """A step whose results may not be used: it may be retried."""
        sequence = data.draw(st.sampled_from(self.sequences))
        self.copy(sequence)
        for position in range(sequence.num_computed_tokens, sequence.num_tokens):
            self.contents[self.slot(sequence.block_table, position)] = ("failed", ())

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
            assert sequence.num_slots >= sequence.num_tokens
            for position in range(sequence.num_computed_tokens):
                slot = self.slot(self.blocks_to_read(sequence), position)
                assert self.contents[slot] == self.content(sequence, position)

    @invariant()
    def what_is_found_is_what_was_computed(self) -> None:
        for sequence in self.sequences:
            known = self.manager.lookup(sequence).block_ids
            for position in range(len(known) * BLOCK_SIZE):
                assert self.contents[self.slot(known, position)] == self.content(sequence, position)

    @staticmethod
    def blocks_to_read(sequence: Sequence) -> list[int]:
        """Its blocks, with the source in the place of a copy that is not made."""
        blocks = list(sequence.block_table)
        if sequence.cow_source is not None:
            blocks[sequence.num_computed_tokens // BLOCK_SIZE] = sequence.cow_source
        return blocks

    def copy(self, sequence: Sequence) -> None:
        """The copies at the start of a step: they may be made, fail, and be made again."""
        if sequence.cow_source is None:
            return
        destination = sequence.block_table[sequence.num_computed_tokens // BLOCK_SIZE]
        for offset in range(BLOCK_SIZE):
            found = self.contents.get(sequence.cow_source * BLOCK_SIZE + offset, ("never written", ()))
            self.contents[destination * BLOCK_SIZE + offset] = found

    @staticmethod
    def slot(block_ids: list[int], position: int) -> int:
        return block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    @staticmethod
    def content(sequence: Sequence, position: int) -> tuple[str, tuple[int, ...]]:
        return sequence.cache_salt, tuple(sequence.token_ids[: position + 1])


BlockManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockManagerMachine = BlockManagerMachine.TestCase
