"""Blocks that left the sliding window of a model whose layers all have one."""

import pytest

from sluice.engine.null_model import NullModelConfig
from sluice.engine.request import Sampling
from sluice.engine.scheduling.blocks.manager import BlockManager
from sluice.engine.scheduling.blocks.windows import WindowSizes
from sluice.engine.sequence import Sequence
from tests.engine.given import CheckingModel, engine_over, lagging, request, run

BLOCK_SIZE = 4
WINDOW = 8


def manager_with(num_blocks: int) -> BlockManager:
    return BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True, window=WindowSizes(WINDOW, 12))


def sequence_of(token_ids: list[int]) -> Sequence:
    return Sequence(
        id=0,
        request_id="r",
        choice=0,
        sampling=Sampling(),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
    )


def held(manager: BlockManager, token_ids: list[int]) -> Sequence:
    sequence = sequence_of(token_ids)
    found = manager.lookup(sequence)
    assert manager.try_hold(sequence, found, num_spare=0)
    sequence.num_computed_tokens = found.num_tokens
    return sequence


def compute(manager: BlockManager, sequence: Sequence, num_tokens: int) -> None:
    sequence.num_computed_tokens = num_tokens
    manager.publish(sequence)


class TestGivenAComputedPromptOfFiveBlocks:
    @staticmethod
    def computed(manager: BlockManager) -> Sequence:
        sequence = held(manager, list(range(20)))
        compute(manager, sequence, 20)
        return sequence

    def test_when_the_next_token_reaches_back_seven_then_two_blocks_are_kept(self) -> None:
        manager = manager_with(5)

        sequence = self.computed(manager)

        # Token 20 attends to tokens 13 to 20, and 13 is in the fourth block.
        assert len(sequence.held_blocks) == 2
        assert manager.num_free_blocks == 3
        manager.check_invariants([sequence])

    @pytest.mark.parametrize(("num_tokens", "num_kept"), [(10, 3), (11, 2), (14, 3), (15, 2)])
    def test_when_less_is_computed_then_the_first_block_of_the_window_is_kept(
        self, num_tokens: int, num_kept: int
    ) -> None:
        manager = manager_with(5)
        sequence = held(manager, list(range(20)))

        compute(manager, sequence, num_tokens)

        # Those that are not computed yet are held too.
        assert len(sequence.held_blocks) - (5 - -(-num_tokens // BLOCK_SIZE)) == num_kept

    def test_when_the_blocks_it_gave_back_are_used_again_then_its_prefix_is_still_found(self) -> None:
        manager = manager_with(5)
        sequence = self.computed(manager)
        other = held(manager, [99] * 12)
        assert set(other.block_table).isdisjoint(sequence.block_table[3:])

        found = manager.lookup(sequence_of(list(range(24))))

        assert (found.num_tokens, found.num_passed) == (20, 3)
        assert found.held_blocks == sequence.block_table[3:]

    def test_when_another_shares_a_part_of_it_then_it_needs_the_window_of_that_part(self) -> None:
        manager = manager_with(5)
        sequence = self.computed(manager)

        found = manager.lookup(sequence_of([*range(16), 99, 98]))

        assert (found.num_tokens, found.num_passed) == (16, 2)
        assert found.held_blocks[1:] == [sequence.block_table[3]]

    def test_when_a_block_of_the_window_is_used_again_then_the_prefix_is_not_found(self) -> None:
        manager = manager_with(5)
        manager.release(self.computed(manager))
        # The three that left the window, and the last one.
        held(manager, [99] * 16)

        found = manager.lookup(sequence_of(list(range(24))))

        assert found.num_tokens == 0

    def test_when_its_contents_are_suspect_then_what_left_the_window_is_not_found_either(self) -> None:
        manager = manager_with(8)
        sequence = self.computed(manager)

        manager.retract(sequence)

        assert manager.lookup(sequence_of(list(range(24)))).num_tokens == 0


class TestGivenAnEngineWithAWindow:
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("caching", [True, False])
    def test_when_outputs_are_long_then_a_cache_of_their_windows_holds_them(self, lag: int, caching: bool) -> None:
        asked = [request(f"r{n}", f"prompt {n}", max_tokens=100, seed=n) for n in range(4)]

        def outputs(window: int, num_blocks: int) -> tuple[dict[tuple[str, int], list[int]], int]:
            model = CheckingModel(NullModelConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, sliding_window=window))
            engine = engine_over(lagging(model) if lag else model, enable_prefix_caching=caching)
            engine.add(asked)
            transcripts = run(engine)
            return {key: one.token_ids for key, one in transcripts.items()}, engine.stats.num_preemptions

        # 4 sequences of 3 or 4 blocks each; without a window, one alone takes 27.
        windowed, num_preemptions = outputs(WINDOW, 28)
        plain, num_plain_preemptions = outputs(0, 28)

        assert windowed == plain
        assert (num_preemptions, num_plain_preemptions > 0) == (0, True)

    @pytest.mark.parametrize("lag", [0, 1])
    def test_when_prompts_are_longer_than_the_window_then_each_holds_a_window_and_a_step(self, lag: int) -> None:
        asked = [request(f"r{n}", bytes([n]) * 90, max_tokens=10, seed=n) for n in range(4)]
        model = CheckingModel(NullModelConfig(num_blocks=31, block_size=BLOCK_SIZE, sliding_window=WINDOW))
        engine = engine_over(
            lagging(model) if lag else model, max_num_batched_tokens=16, long_prefill_token_threshold=4
        )

        engine.add(asked)
        engine.advance()
        num_running = engine.stats.num_running
        transcripts = run(engine)

        # Of the 23 blocks of a prompt, 7 hold a window and a step of 16 tokens, wherever they begin.
        assert num_running == 4
        assert engine.stats.num_preemptions == 0
        assert {len(one.token_ids) for one in transcripts.values()} == {10}
