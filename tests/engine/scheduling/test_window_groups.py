"""Blocks of layers with a sliding window, in a model where others attend to all tokens."""

import pytest

from sluice.engine.executor import ModelLimits
from sluice.engine.null_model import NullModelConfig
from sluice.engine.request import Sampling
from sluice.engine.scheduling.admission import Watermark
from sluice.engine.scheduling.blocks.manager import BlockManager
from sluice.engine.scheduling.blocks.windows import WindowSizes
from sluice.engine.sequence import Sequence
from tests.engine.given import CheckingModel, engine_over, lagging, request, run, undisturbed

BLOCK_SIZE = 4
WINDOW = 8
STEP = 12
GROUPS = 2
PROMPT = b"a few words"


def manager_with(num_blocks: int) -> BlockManager:
    return BlockManager(
        num_blocks, BLOCK_SIZE, enable_prefix_caching=True, window=WindowSizes(WINDOW, STEP, num_groups=GROUPS)
    )


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
    assert manager.try_grow(sequence, num_tokens)
    manager.end_copy(sequence)
    sequence.num_computed_tokens = num_tokens
    manager.publish(sequence)


def limits_with(num_blocks: int, *, groups: int = GROUPS, max_model_len: int = 400) -> ModelLimits:
    return ModelLimits(
        max_model_len=max_model_len,
        vocab_size=300,
        eos_token_ids=frozenset(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        sliding_window=WINDOW,
        window_groups=groups,
    )


class TestGivenAComputedPromptOfFiveBlocks:
    @staticmethod
    def computed(manager: BlockManager) -> Sequence:
        sequence = held(manager, list(range(20)))
        compute(manager, sequence, 20)
        return sequence

    def test_when_it_holds_blocks_then_all_for_some_layers_and_a_window_for_others(self) -> None:
        manager = manager_with(15)

        sequence = self.computed(manager)

        # Token 20 attends to tokens 13 to 20, and 13 is in the fourth block.
        assert len(sequence.held_blocks) == 5 + GROUPS * 2
        assert manager.num_free_blocks == GROUPS * 3
        manager.check_invariants([sequence])

    def test_when_what_left_the_window_is_used_again_then_its_prefix_is_still_found(self) -> None:
        manager = manager_with(15)
        sequence = self.computed(manager)
        other = held(manager, [99] * 8)
        assert manager.num_free_blocks == 0

        found = manager.lookup(sequence_of(list(range(24))))

        assert (found.num_tokens, found.num_passed) == (20, 3)
        assert set(found.held_blocks) == set(sequence.held_blocks)
        manager.check_invariants([sequence, other])

    def test_when_another_shares_less_than_its_window_begins_with_then_nothing_is_found(self) -> None:
        manager = manager_with(15)
        self.computed(manager)
        held(manager, [99] * 8)

        found = manager.lookup(sequence_of([*range(12), 99, 98]))

        assert found.num_tokens == 0

    def test_when_one_block_of_an_entry_is_used_again_then_the_others_are_next(self) -> None:
        manager = manager_with(15)
        manager.release(self.computed(manager))
        # One block more than the windows gave back: of the last entry.
        other = held(manager, [99] * 8)
        assert manager.try_grow(other, 9)

        found = manager.lookup(sequence_of(list(range(24))))

        assert found.num_tokens == 0
        manager.check_invariants([other])

    def test_when_another_continues_in_its_last_block_then_all_tables_get_a_copy(self) -> None:
        manager = manager_with(24)
        first = held(manager, list(range(22)))
        compute(manager, first, 22)

        second = held(manager, [*range(22), 99])

        assert second.num_computed_tokens == 22
        assert second.cow_sources == first.blocks_at(5)
        assert set(second.blocks_at(5)).isdisjoint(first.blocks_at(5))
        manager.check_invariants([first, second])

    def test_when_a_part_of_the_last_block_is_free_then_it_is_not_continued_in(self) -> None:
        manager = manager_with(60)
        first = held(manager, list(range(40)))
        compute(manager, first, 24)
        compute(manager, first, 40)
        assert first.num_passed_blocks == 8

        # Of block 5, layers that attend to all hold theirs, and those with a window gave theirs back.
        found = manager.lookup(sequence_of([*range(22), 99, 98]))

        assert (found.num_tokens, found.tail) == (20, None)

    def test_when_its_contents_are_suspect_then_what_left_the_window_is_not_found_either(self) -> None:
        manager = manager_with(30)
        sequence = self.computed(manager)

        manager.retract(sequence)

        assert manager.lookup(sequence_of(list(range(24)))).num_tokens == 0
        manager.check_invariants([sequence])


class TestGivenALongPrompt:
    def test_when_it_joins_then_layers_with_a_window_hold_one_window_and_one_step(self) -> None:
        manager = manager_with(100)

        sequence = held(manager, list(range(200)))

        assert len(sequence.block_table) == 50
        # Of 19 tokens that a step attends to, one may be in the first block.
        assert (sequence.num_entries, sequence.num_slots) == (6, 24)

    @pytest.mark.parametrize("num_first", [9, 10, 11, 12])
    def test_when_all_other_blocks_are_taken_then_every_chunk_finds_its_own(self, num_first: int) -> None:
        manager = manager_with(50 + 6 * GROUPS)
        sequence = held(manager, list(range(200)))
        assert manager.num_free_blocks == 0

        for end in [*range(num_first, 200, STEP), 200]:
            compute(manager, sequence, end)

        manager.check_invariants([sequence])

    def test_when_it_grows_then_its_shorter_table_catches_up(self) -> None:
        manager = manager_with(100)
        sequence = held(manager, list(range(200)))

        assert manager.try_grow(sequence, 28)

        assert (len(sequence.block_table), sequence.num_entries, sequence.num_slots) == (50, 7, 28)

    def test_when_there_are_blocks_for_one_table_only_then_it_does_not_grow(self) -> None:
        manager = manager_with(50 + 6 * GROUPS + 1)
        sequence = held(manager, list(range(200)))
        before = [list(table) for table in sequence.tables]

        assert not manager.try_grow(sequence, 28)

        assert (sequence.tables, manager.num_free_blocks) == (before, 1)


class TestGivenLimits:
    @pytest.mark.parametrize(("num_prompt_tokens", "max_tokens", "most"), [(10, 5, 15), (10, 500, 400), (399, 1, 400)])
    def test_when_a_sequence_generates_all_it_may_then_its_last_token_is_not_cached(
        self, num_prompt_tokens: int, max_tokens: int, most: int
    ) -> None:
        limits = limits_with(400, max_model_len=400)

        assert limits.most_tokens(num_prompt_tokens, max_tokens) == most
        assert limits.most_cached_tokens(num_prompt_tokens, max_tokens) == most - 1

    @pytest.mark.parametrize("groups", [1, 6])
    @pytest.mark.parametrize("num_blocks", [7, 50, 61, 400])
    def test_when_the_longest_sequence_is_asked_for_then_it_is_the_last_that_fits(
        self, groups: int, num_blocks: int
    ) -> None:
        limits = limits_with(num_blocks, groups=groups)

        longest = limits.longest_sequence(num_blocks, STEP)

        assert limits.blocks_of(longest, STEP) <= num_blocks < limits.blocks_of(longest + 1, STEP)

    @pytest.mark.parametrize(("num_blocks", "longest"), [(3, 12), (6, 24), (7, 400), (50, 400)])
    def test_when_all_layers_have_the_window_then_a_window_and_a_step_hold_any_sequence(
        self, num_blocks: int, longest: int
    ) -> None:
        limits = limits_with(num_blocks, groups=0)

        assert limits.longest_request(STEP) == longest
        assert limits.blocks_of(longest, STEP) <= num_blocks
        assert limits.blocks_of(4000, STEP) == 7

    def test_when_a_long_sequence_runs_then_an_entry_is_spared(self) -> None:
        manager, limits = manager_with(400), limits_with(400)
        sequence = held(manager, list(range(100)))
        sequence.sampling = Sampling(max_tokens=101)
        compute(manager, sequence, 100)

        assert Watermark(limits).num_spare_blocks([sequence]) == 1 + GROUPS


class TestGivenAnEngine:
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("caching", [True, False])
    def test_when_one_sequence_needs_every_block_then_it_runs(self, lag: int, caching: bool) -> None:
        num_blocks = limits_with(0).blocks_of(90, 16)
        model = CheckingModel(
            NullModelConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, sliding_window=WINDOW, window_groups=GROUPS)
        )
        engine = engine_over(lagging(model) if lag else model, enable_prefix_caching=caching, max_num_batched_tokens=16)
        asked = request("r", b"a" * 70, max_tokens=21)
        assert engine.max_request_tokens >= 91

        engine.add([asked])
        room = engine.room()
        transcripts = run(engine)

        assert room.kv_tokens == 0
        assert transcripts["r", 0].token_ids == undisturbed(asked)["r", 0].token_ids
        assert engine.stats.num_preemptions == 0
        assert engine.room().kv_tokens >= 90

    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("admission", ["watermark", "guaranteed"])
    def test_when_all_layers_have_the_window_then_a_long_request_runs_in_few_blocks(
        self, lag: int, caching: bool, admission: str
    ) -> None:
        num_blocks = limits_with(0, groups=0).blocks_of(400, 16)
        model = CheckingModel(
            NullModelConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, sliding_window=WINDOW, max_model_len=400)
        )
        executor = lagging(model) if lag else model
        config = {"enable_prefix_caching": caching, "admission": admission, "max_num_batched_tokens": 16}
        engine = engine_over(executor, **config)
        asked = [request(f"r{n}", bytes([n]) * 300, max_tokens=100, seed=n) for n in range(2)]
        assert num_blocks * BLOCK_SIZE < 40
        assert engine.room().kv_tokens == 400

        engine.add(asked)
        transcripts = run(engine)

        for one in asked:
            alone = undisturbed(one, max_model_len=400)[one.id, 0]
            assert transcripts[one.id, 0].token_ids == alone.token_ids
        assert engine.room().kv_tokens == 400

    def test_when_a_request_could_never_fit_then_it_is_rejected(self) -> None:
        model = CheckingModel(
            NullModelConfig(num_blocks=40, block_size=BLOCK_SIZE, sliding_window=WINDOW, window_groups=GROUPS)
        )
        engine = engine_over(model, max_num_batched_tokens=16)

        engine.add([request("r", b"a" * 70, max_tokens=50)])
        transcripts = run(engine)

        finish = transcripts["r", 0].finish
        assert finish is not None
        # 24 blocks of the layers that attend to all, and 8 for each group.
        assert "can become 120 tokens; this worker's KV cache holds 96" in (finish.error or "")

    @pytest.mark.parametrize("lag", [0, 1])
    def test_when_contexts_are_long_then_the_same_memory_holds_more_of_them(self, lag: int) -> None:
        asked = [request(f"r{n}", bytes([n]) * 150, max_tokens=50, seed=n) for n in range(6)]

        def most_running(groups: int, num_blocks: int) -> int:
            model = CheckingModel(
                NullModelConfig(
                    num_blocks=num_blocks,
                    block_size=BLOCK_SIZE,
                    sliding_window=WINDOW if groups else 0,
                    window_groups=groups,
                )
            )
            engine = engine_over(lagging(model) if lag else model, max_num_batched_tokens=16, admission="guaranteed")
            engine.add(asked)
            most = 0
            while not engine.is_idle:
                engine.advance()
                engine.check_invariants()
                most = max(most, engine.stats.num_running)
            assert engine.stats.num_preemptions == 0
            return most

        # Two sequences of 50 entries each, in blocks of all layers, or of a seventh.
        assert most_running(groups=0, num_blocks=110) == 2
        assert most_running(groups=6, num_blocks=110 * 7) == 6

    def test_when_a_long_job_fits_alone_then_it_counts_as_one_that_fits(self) -> None:
        model = CheckingModel(
            NullModelConfig(max_model_len=400, num_blocks=150, block_size=4, sliding_window=16, window_groups=5)
        )
        engine = engine_over(model, max_num_batched_tokens=16)

        assert engine.stats.kv_tokens_total == 100
        assert engine.max_request_tokens > 300
        # The queue passes over what exceeds it.
        assert engine.most_offered_tokens == engine.max_request_tokens

    def test_when_slots_are_for_the_longest_sequence_then_requests_get_one(self) -> None:
        model = CheckingModel(
            NullModelConfig(num_blocks=40, block_size=4, sliding_window=7, window_groups=3, max_model_len=200)
        )
        engine = engine_over(model, max_num_batched_tokens=16, discipline="slots")
        asked = [request(f"r{n}", PROMPT, max_tokens=8) for n in range(3)]
        engine.add(asked)

        found = run(engine)

        assert {key: found[key].token_ids for key in found} == {
            (one.id, 0): undisturbed(one)[one.id, 0].token_ids for one in asked
        }
