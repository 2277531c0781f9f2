"""Who runs in a step, and how many tokens each computes."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from sluice.engine.batch import Batch, Sampled
from sluice.engine.config import EngineConfig
from sluice.engine.executor import ModelLimits
from sluice.engine.request import NEVER_PREEMPTED, Sampling
from sluice.engine.scheduling.blocks.manager import BlockManager, CachedPrefix
from sluice.engine.scheduling.disciplines import make_scheduler
from sluice.engine.scheduling.policies import MAX_YIELDS
from sluice.engine.scheduling.scheduler import Scheduler
from sluice.engine.sequence import Sequence, SequenceStatus

_ids = count()
_made: dict[int, Sequence] = {}
"""By id."""


def scheduler_with(
    *, num_blocks: int = 64, block_size: int = 4, clock: Callable[[], float] = lambda: 0.0, **options: Any
) -> Scheduler:
    small: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    config = EngineConfig(**small | options)
    limits = ModelLimits(
        max_model_len=1024,
        vocab_size=256,
        eos_token_ids=frozenset(),
        num_blocks=num_blocks,
        block_size=block_size,
    )
    return make_scheduler(config, limits, clock=clock)


DEFAULT = Sampling()


def sequence_of(
    num_tokens: int, *, token: int | None = None, priority: int = 0, sampling: Sampling = DEFAULT
) -> Sequence:
    sequence_id = next(_ids)
    _made[sequence_id] = Sequence(
        id=sequence_id,
        request_id=f"r{sequence_id}",
        choice=0,
        sampling=sampling,
        priority=priority,
        token_ids=[sequence_id % 256 if token is None else token] * num_tokens,
        num_prompt_tokens=num_tokens,
        most_ahead_tokens=1023,
    )
    return _made[sequence_id]


def added(scheduler: Scheduler, num_tokens: int, **options: Any) -> Sequence:
    sequence = sequence_of(num_tokens, **options)
    scheduler.add(sequence)
    return sequence


def step(scheduler: Scheduler) -> Batch:
    """Plan a step, and commit it with the token 7 for all that sample."""
    batch = scheduler.schedule()
    scheduler.commit(batch, [Sampled((7,)) for row in batch.rows if row.samples])
    scheduler.check_invariants()
    return batch


def step_until_preempted(scheduler: Scheduler, sequence: Sequence) -> None:
    for _ in range(100):
        if sequence.num_preemptions:
            return
        step(scheduler)
    raise AssertionError(f"still not preempted: {sequence}")


def shares(batch: Batch) -> list[tuple[Sequence, int]]:
    return [(_made[row.sequence_id], row.num_tokens) for row in batch.rows]


class TestGivenPromptsThatWait:
    def test_when_they_fit_the_budget_then_all_join_in_the_order_in_which_they_came(self) -> None:
        scheduler = scheduler_with()
        first, second = added(scheduler, 5), added(scheduler, 6)

        batch = step(scheduler)

        assert shares(batch) == [(first, 5), (second, 6)]
        assert batch.num_joined == 2

    def test_when_one_exceeds_the_budget_then_it_is_cut_and_only_its_last_chunk_samples(self) -> None:
        scheduler = scheduler_with()
        long = added(scheduler, 20)

        chunks = [step(scheduler).rows[0] for _ in range(3)]

        assert [(c.start, c.num_tokens, c.samples) for c in chunks] == [(0, 16, False), (16, 4, True), (20, 1, True)]
        assert long.num_output_tokens == 2

    def test_when_the_sequence_limit_is_reached_then_the_rest_wait(self) -> None:
        scheduler = scheduler_with(max_num_seqs=2)
        sequences = [added(scheduler, 1) for _ in range(3)]

        assert [sequence for sequence, _ in shares(step(scheduler))] == sequences[:2]
        assert [sequence for sequence, _ in shares(step(scheduler))] == sequences[:2]

    def test_when_the_head_does_not_fit_then_none_overtakes_it(self) -> None:
        scheduler = scheduler_with(num_blocks=4)
        running = added(scheduler, 5)
        step(scheduler)
        added(scheduler, 8)
        added(scheduler, 1)

        assert [sequence for sequence, _ in shares(step(scheduler))] == [running]

    def test_when_only_the_first_chunk_would_fit_then_the_prompt_waits(self) -> None:
        scheduler = scheduler_with(num_blocks=6, max_num_batched_tokens=4)
        running = added(scheduler, 1)
        step(scheduler)
        added(scheduler, 20)

        assert [sequence for sequence, _ in shares(step(scheduler))] == [running]

    def test_when_nothing_runs_then_a_prompt_that_fills_the_whole_cache_joins(self) -> None:
        scheduler = scheduler_with(num_blocks=4)
        whole = added(scheduler, 16)

        assert shares(step(scheduler)) == [(whole, 16)]


class TestGivenSequencesThatGenerate:
    def test_when_the_first_leaves_then_others_keep_their_slots_and_nothing_is_written(self) -> None:
        scheduler = scheduler_with()
        first, *others = (added(scheduler, 1) for _ in range(4))
        before = step(scheduler)

        scheduler.finish([first])
        after = step(scheduler)

        assert [row.slot for row in after.rows] == [row.slot for row in before.rows[1:]]
        assert [row.sequence_id for row in after.rows] == [sequence.id for sequence in others]
        assert (after.admissions, after.table_writes) == ((), ())

    def test_when_a_long_prompt_comes_then_each_still_gets_a_token_in_every_step(self) -> None:
        scheduler = scheduler_with()
        generating = [added(scheduler, 1) for _ in range(3)]
        step(scheduler)
        long = added(scheduler, 40)

        for num_chunk in (13, 13, 13, 1):
            assert shares(step(scheduler)) == [*((sequence, 1) for sequence in generating), (long, num_chunk)]

    def test_when_a_prompt_of_higher_priority_comes_then_it_leaves_each_a_token(self) -> None:
        scheduler = scheduler_with(policy="priority")
        generating = [added(scheduler, 1) for _ in range(3)]
        step(scheduler)
        urgent = added(scheduler, 40, priority=1)
        step(scheduler)

        assert shares(step(scheduler)) == [(urgent, 13), *((sequence, 1) for sequence in generating)]

    def test_when_the_threshold_is_set_then_only_a_prompt_among_others_is_cut_to_it(self) -> None:
        scheduler = scheduler_with(long_prefill_token_threshold=4)
        long = added(scheduler, 40)
        assert shares(step(scheduler)) == [(long, 16)]
        other = added(scheduler, 2)

        assert shares(step(scheduler)) == [(long, 4), (other, 2)]


class TestGivenAFullCache:
    """Two sequences of four tokens each hold every block, and are about to need another one."""

    def full(self, **options: Any) -> tuple[Scheduler, Sequence, Sequence]:
        scheduler = scheduler_with(num_blocks=3, **options)
        oldest, newest = added(scheduler, 3), added(scheduler, 3)
        step(scheduler)
        step(scheduler)
        return scheduler, oldest, newest

    def test_when_the_oldest_grows_then_the_newest_is_preempted_to_the_head_of_waiting(self) -> None:
        scheduler, oldest, newest = self.full()
        later = added(scheduler, 1)
        step(scheduler)

        batch = step(scheduler)

        assert newest.num_preemptions == 1
        assert newest.status is SequenceStatus.WAITING
        assert newest.block_table == []
        assert scheduler.waiting.in_order() == [newest, later]
        assert [sequence for sequence, _ in shares(batch)] == [oldest]

    def test_when_it_runs_again_then_it_says_when_it_was_preempted_and_until_when(self) -> None:
        now_s = iter(range(1000))
        scheduler, oldest, newest = self.full(clock=lambda: float(next(now_s)))
        step_until_preempted(scheduler, newest)
        began_s = newest.preemptions.since_s

        scheduler.finish([oldest])
        step(scheduler)

        assert began_s is not None
        [(begin_s, end_s)] = newest.preemptions.ended
        assert (begin_s, newest.preemptions.waited_s, newest.preemptions.since_s) == (began_s, end_s - began_s, None)
        assert end_s > begin_s
        assert oldest.preemptions is NEVER_PREEMPTED

    def test_when_it_returns_then_its_prompt_and_output_are_recomputed_and_it_continues(self) -> None:
        scheduler, oldest, newest = self.full()
        step_until_preempted(scheduler, newest)
        num_tokens = newest.num_tokens

        scheduler.finish([oldest])
        batch = step(scheduler)

        assert shares(batch) == [(newest, num_tokens)]
        assert newest.num_tokens == num_tokens + 1

    def test_when_the_policy_is_priority_then_the_lowest_is_preempted_even_if_oldest(self) -> None:
        scheduler = scheduler_with(num_blocks=3, policy="priority")
        least, urgent = added(scheduler, 3), added(scheduler, 3, priority=1)
        for _ in range(4):
            step(scheduler)

        assert (least.num_preemptions, urgent.num_preemptions) == (1, 0)

    def test_when_one_was_preempted_then_none_joins_in_the_same_step(self) -> None:
        scheduler = scheduler_with(num_blocks=6, policy="priority", max_num_seqs=2)
        urgent, least = added(scheduler, 3, priority=2), added(scheduler, 12)
        least.num_yields = MAX_YIELDS
        step(scheduler)
        next_one = added(scheduler, 1, priority=1)
        batches = [step(scheduler) for _ in range(6)]

        gave_way = next(n for n, batch in enumerate(batches) if len(batch.rows) == 1)

        assert [sequence for sequence, _ in shares(batches[gave_way])] == [urgent]
        assert [sequence for sequence, _ in shares(batches[gave_way + 1])] == [urgent, next_one]
        assert least.status is SequenceStatus.WAITING


class TestGivenASequenceThatFinishes:
    def test_when_it_ran_then_its_blocks_are_free_and_the_next_one_joins(self) -> None:
        scheduler = scheduler_with(max_num_seqs=1)
        first, second = added(scheduler, 4), added(scheduler, 4)
        step(scheduler)

        scheduler.finish([first])

        assert scheduler.blocks.num_free_blocks == 64
        assert [sequence for sequence, _ in shares(step(scheduler))] == [second]

    def test_when_it_waited_then_it_never_runs(self) -> None:
        scheduler = scheduler_with()
        first, second = added(scheduler, 4), added(scheduler, 4)

        scheduler.finish([first])

        assert [sequence for sequence, _ in shares(step(scheduler))] == [second]


class TestGivenAPromptThatIsBeingComputed:
    """A hundred tokens, of which a step computes sixteen."""

    def being_computed(self, **options: Any) -> tuple[Scheduler, Sequence]:
        settings: dict[str, Any] = {"enable_prefix_caching": True}
        scheduler = scheduler_with(**settings | options)
        first = added(scheduler, 100, token=5)
        step(scheduler)
        return scheduler, first

    def test_when_the_same_comes_again_then_it_waits_and_computes_only_its_end(self) -> None:
        scheduler, first = self.being_computed(long_prefill_token_threshold=8)
        again = added(scheduler, 100, token=5)
        while again.status is SequenceStatus.WAITING:
            step(scheduler)

        assert first.num_uncomputed_tokens < 32
        assert 64 < again.num_cached_tokens <= 96

    def test_when_another_prompt_comes_then_it_joins_at_once(self) -> None:
        scheduler, first = self.being_computed(long_prefill_token_threshold=8)
        other = added(scheduler, 100, token=6)

        assert shares(step(scheduler)) == [(first, 8), (other, 8)]

    def test_when_caching_is_off_then_none_waits_for_it(self) -> None:
        scheduler, first = self.being_computed(long_prefill_token_threshold=8, enable_prefix_caching=False)
        again = added(scheduler, 100, token=5)

        assert shares(step(scheduler)) == [(first, 8), (again, 8)]

    def test_when_less_than_half_of_a_prompt_is_shared_then_it_joins_at_once(self) -> None:
        scheduler, first = self.being_computed(long_prefill_token_threshold=8)
        other = added(scheduler, 140, token=5)
        other.token_ids[56:] = [6] * 84

        assert shares(step(scheduler)) == [(first, 8), (other, 8)]

    def test_when_it_is_aborted_then_the_one_that_waited_for_it_joins(self) -> None:
        scheduler, first = self.being_computed(long_prefill_token_threshold=8)
        again = added(scheduler, 100, token=5)
        step(scheduler)
        assert again.status is SequenceStatus.WAITING

        scheduler.finish([first])

        assert [sequence for sequence, _ in shares(step(scheduler))] == [again]


class TestGivenPrefixCaching:
    def test_when_sequences_join_then_each_attempt_looks_into_the_prefix_index_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scheduler = scheduler_with(num_blocks=8, enable_prefix_caching=True)
        looked_up: list[int] = []

        def lookup(sequence: Sequence) -> CachedPrefix:
            looked_up.append(sequence.id)
            return BlockManager.lookup(scheduler.blocks, sequence)

        monkeypatch.setattr(scheduler.blocks, "lookup", lookup)
        joining, too_long, behind = added(scheduler, 5), added(scheduler, 30), added(scheduler, 1)

        step(scheduler)

        assert looked_up == [joining.id, too_long.id]
        assert behind.status is SequenceStatus.WAITING

    def test_when_output_fills_a_block_then_it_is_found_too(self) -> None:
        scheduler = scheduler_with(enable_prefix_caching=True)
        first = added(scheduler, 3, token=5)
        for _ in range(7):
            step(scheduler)
        resumed = added(scheduler, 3)
        resumed.token_ids[:] = first.token_ids

        assert shares(step(scheduler)) == [(first, 1), (resumed, 2)]
        assert resumed.num_cached_tokens == 3

    def test_when_a_prompt_was_computed_before_then_only_its_end_is_computed_again(self) -> None:
        scheduler = scheduler_with(enable_prefix_caching=True)
        step_one = added(scheduler, 10, token=5)
        step(scheduler)
        again = added(scheduler, 10, token=5)

        assert shares(step(scheduler)) == [(step_one, 1), (again, 1)]
        assert again.num_cached_tokens == 9

    def test_when_a_preempted_one_returns_then_its_cached_prompt_tokens_are_unchanged(self) -> None:
        scheduler = scheduler_with(num_blocks=5, enable_prefix_caching=True)
        oldest, newest = added(scheduler, 5, token=1), added(scheduler, 5, token=2)
        step_until_preempted(scheduler, newest)

        scheduler.finish([oldest])
        (returned,) = step(scheduler).rows

        assert returned.start > 0
        assert newest.num_cached_tokens == 0
