"""Blocks that leave the device and come back from host memory."""

from collections import Counter
from collections.abc import Iterable
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.batch import Batch
from sluice.engine.null_model import NullModelConfig
from sluice.engine.request import Sampling
from sluice.engine.scheduling.blocks import host_tier
from sluice.engine.scheduling.blocks.host_tier import HostTier
from sluice.engine.scheduling.blocks.manager import BlockManager
from sluice.engine.sequence import Sequence
from tests.engine.given import Checked, CheckingModel, engine_over, lagging, request, run, undisturbed
from tests.examples import examples


def nothing() -> set[int]:
    """The blocks that a step writes, of a step that writes none."""
    return set()


def saved(tier: HostTier, *keys: int) -> None:
    """Save a block for each of `keys`, in a step that succeeds."""
    for key in keys:
        tier.save(key, block_id=key)
    tier.confirm(tier.saves(nothing))


def joined(manager: BlockManager, token_ids: Iterable[int]) -> Sequence:
    """Return a sequence that holds blocks for its tokens."""
    known = list(token_ids)
    sequence = Sequence(
        id=0,
        request_id="r",
        choice=0,
        sampling=Sampling(),
        token_ids=known,
        num_prompt_tokens=len(known),
    )
    assert manager.try_hold(sequence, manager.lookup(sequence), num_spare=0)
    return sequence


def computed(manager: BlockManager, sequence: Sequence) -> None:
    """Compute all of its tokens."""
    if sequence.has_pending_copies:
        manager.end_copy(sequence)
    sequence.num_computed_tokens = sequence.num_tokens
    manager.publish(sequence)


class TestGivenATierOfThreeBlocks:
    def test_when_a_block_is_saved_then_it_is_found_once_a_step_with_it_has_succeeded(self) -> None:
        tier = HostTier(3)
        tier.save(7, block_id=0)

        before = tier.leading([7])
        saves = tier.saves(nothing)
        tier.confirm(saves)

        assert before == []
        assert tier.leading([7]) == [saves[0].destination]
        assert tier.saves(nothing) == ()

    def test_when_it_is_full_then_the_least_recently_used_is_replaced(self) -> None:
        tier = HostTier(3)
        saved(tier, 1, 2, 3)
        saved(tier, 1)

        saved(tier, 4)

        assert [bool(tier.leading([key])) for key in (1, 2, 3, 4)] == [True, False, True, True]
        tier.check_invariants(Counter())

    def test_when_blocks_are_being_loaded_then_they_are_not_replaced(self) -> None:
        tier = HostTier(3)
        saved(tier, 1, 2, 3)
        blocks = tier.leading([1, 2, 3])
        tier.begin_load([1, 2, 3], blocks)

        saved(tier, 4)
        tier.end_load(blocks)
        saved(tier, 5)

        assert [bool(tier.leading([key])) for key in (1, 2, 3, 4, 5)] == [False, True, True, False, True]

    def test_when_contents_may_be_wrong_then_neither_they_nor_pending_saves_are_found(self) -> None:
        tier = HostTier(3)
        saved(tier, 1)
        tier.save(2, block_id=2)
        pending = tier.saves(nothing)
        tier.save(2, block_id=3)

        tier.forget([1, 2])
        tier.confirm(pending)

        assert (tier.leading([1]), tier.leading([2])) == ([], [])
        tier.check_invariants(Counter())

    def test_when_contents_are_forgotten_amid_a_load_then_the_block_is_reused_after_it(
        self,
    ) -> None:
        tier = HostTier(3)
        saved(tier, 1, 2, 3)
        (loaded,) = tier.leading([1])
        tier.begin_load([1], [loaded])
        tier.forget([1])

        saved(tier, 4)
        during = tier.leading([4])
        tier.check_invariants(Counter([loaded]))
        tier.end_load([loaded])
        saved(tier, 5)

        assert during != [loaded]
        assert tier.leading([5]) == [loaded]
        tier.check_invariants(Counter())


class TestGivenMoreSavesThanAStepMayHave:
    """The blocks 0 to 79 of the device were taken in one step, and hold the contents of the keys 100 to 179."""

    def tier(self) -> HostTier:
        tier = HostTier(200)
        for block in range(80):
            tier.save(100 + block, block_id=block)
        return tier

    def test_when_steps_fill_none_of_the_blocks_then_all_are_saved_some_in_each_step(self) -> None:
        tier = self.tier()

        steps = [tier.saves(nothing)]
        while steps[-1]:
            tier.confirm(steps[-1])
            steps.append(tier.saves(nothing))

        assert [len(saves) for saves in steps] == [32, 32, 16, 0]
        assert len(tier.leading(range(100, 180))) == 80
        tier.check_invariants(Counter())

    def test_when_a_step_fills_some_then_these_are_saved_first(self) -> None:
        tier = self.tier()

        saves = tier.saves(lambda: set(range(70, 80)))

        assert [save.source for save in saves] == [*range(70, 80), *range(22)]
        assert [save.number for save in saves] == list(range(1, 33))

    def test_when_it_fills_more_than_it_may_save_then_the_others_are_not_saved(self) -> None:
        tier = self.tier()

        tier.confirm(tier.saves(lambda: set(range(40))))
        later = tier.saves(nothing)

        assert len(tier.leading(range(100, 180))) == 32
        assert [save.source for save in later] == list(range(40, 72))
        tier.check_invariants(Counter())

    def test_when_a_step_with_them_fails_then_the_next_has_them_again_beside_new_ones(self) -> None:
        tier = self.tier()
        failed = tier.saves(nothing)

        again = tier.saves(nothing)

        assert again[:32] == failed
        assert len(again) == 64

    def test_when_contents_may_be_wrong_then_their_waiting_saves_are_dropped(self) -> None:
        tier = self.tier()
        tier.confirm(tier.saves(nothing))

        tier.forget(range(132, 180))

        assert tier.saves(nothing) == ()
        tier.check_invariants(Counter())


class TestGivenATailOnTheDeviceAfterABlockInTheHost:
    """Two computed the same first block at once; it was saved and evicted, and the tail after it stayed."""

    def test_when_one_with_both_joins_then_it_loads_the_block_and_shares_no_tail(self) -> None:
        manager = BlockManager(6, 4, enable_prefix_caching=True, num_host_blocks=8)
        prefix = [1, 2, 3, 4]
        first, second = joined(manager, [*prefix, 9]), joined(manager, [*prefix, 5, 6, 7])
        computed(manager, first)
        manager.release(first)
        computed(manager, second)
        manager.release(joined(manager, [*prefix, 8]))
        evicting = joined(manager, range(100, 116))
        computed(manager, evicting)
        manager.host.confirm(manager.host.saves(nothing))
        manager.release(second)
        other = joined(manager, [50, 51, 52])
        manager.release(evicting)

        last = joined(manager, [*prefix, 5, 6, 7, 8])

        assert len(last.loads) == 1
        assert last.cow_sources == ()
        manager.check_invariants([last, other])


class FailsAfterWriting(CheckingModel):
    """Every second call computes its step, and then raises."""

    num_calls = 0

    def launch(self, batch: Batch) -> Checked:
        self.num_calls += 1
        launched = super().launch(batch)
        if self.num_calls % 2:
            raise RuntimeError("injected failure")
        return launched


class TestGivenACacheThatHoldsHalfOfWhatRuns:
    ASKED = tuple(request(f"r{n}", bytes([n]) * 20, max_tokens=40, seed=n) for n in range(6))

    @pytest.mark.parametrize("lag", [0, 1])
    def test_when_preempted_ones_return_then_they_load_what_they_lost(self, lag: int) -> None:
        def outcome(num_host_blocks: int) -> tuple[dict[tuple[str, int], list[int]], int, int]:
            model = CheckingModel(NullModelConfig(num_blocks=40, block_size=4, num_host_blocks=num_host_blocks))
            engine = engine_over(lagging(model) if lag else model)
            engine.add(self.ASKED)
            transcripts = run(engine)
            tokens = {key: one.token_ids for key, one in transcripts.items()}
            return tokens, engine.stats.num_loaded_tokens, model.num_computed_tokens

        tokens, num_loaded, num_computed = outcome(100)
        plain_tokens, num_plain_loaded, num_plain_computed = outcome(0)

        assert tokens == plain_tokens
        assert (num_loaded > 0, num_plain_loaded) == (True, 0)
        assert num_computed < num_plain_computed

    @pytest.mark.parametrize("lag", [0, 1])
    def test_when_a_step_may_save_two_blocks_then_what_is_loaded_is_still_right(
        self, lag: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A preempted one that returns takes all of its blocks at once, and fills them in chunks."""
        monkeypatch.setattr(host_tier, "MAX_STEP_SAVES", 2)
        model = CheckingModel(NullModelConfig(num_blocks=40, block_size=4, num_host_blocks=100))
        engine = engine_over(lagging(model) if lag else model, max_num_batched_tokens=12)
        engine.add(self.ASKED)

        transcripts = run(engine)

        assert model.most_saves == 2
        assert engine.stats.num_loaded_tokens > 0
        for asked in self.ASKED:
            assert transcripts[asked.id, 0].token_ids == undisturbed(asked)[asked.id, 0].token_ids

    def test_when_steps_fail_after_they_have_written_then_saved_blocks_are_still_right(self) -> None:
        model = FailsAfterWriting(NullModelConfig(num_blocks=40, block_size=4, num_host_blocks=100))
        engine = engine_over(model, max_step_retries=1)
        engine.add(self.ASKED)

        transcripts = run(engine)

        assert engine.stats.num_loaded_tokens > 0
        for asked in self.ASKED:
            assert transcripts[asked.id, 0].token_ids == undisturbed(asked)[asked.id, 0].token_ids


@given(random=st.randoms(use_true_random=False), num_blocks=st.integers(20, 30), num_host_blocks=st.integers(4, 60))
@settings(max_examples=examples(60), deadline=None)
def test_when_prefixes_are_shared_then_what_is_loaded_is_what_was_computed(
    random: Random, num_blocks: int, num_host_blocks: int
) -> None:
    prefixes = [bytes(random.choices(b"abc", k=random.randint(4, 24))) for _ in range(4)]
    asked = [
        request(
            f"r{n}",
            random.choice(prefixes)[: random.randint(1, 24)] + bytes(random.choices(b"ab", k=random.randint(0, 6))),
            max_tokens=random.randint(1, 40),
            seed=n % 2,
        )
        for n in range(30)
    ]
    model = CheckingModel(
        NullModelConfig(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=80,
            mean_output_tokens=30,
            num_host_blocks=num_host_blocks,
        )
    )
    sizes = {"max_num_seqs": random.randint(2, 8), "max_num_batched_tokens": random.choice([8, 64])}
    engine = engine_over(model, max_step_retries=0, **sizes)
    coming = list(asked)
    with patch.object(host_tier, "MAX_STEP_SAVES", random.choice([1, 3, 32])):
        for _ in range(3000):
            if coming and random.random() < 0.25:
                engine.add([coming.pop()])
            if random.random() < 0.02:
                engine.abort([f"r{random.randrange(30)}"])
            # The model raises if a slot holds something else, and the engine would end that sequence with an error.
            assert not [one.finish for one in engine.advance() if one.finish and one.finish.error]
            engine.check_invariants()
            if engine.is_idle and not coming:
                break
    assert engine.is_idle
