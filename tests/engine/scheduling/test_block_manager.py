"""The cache's blocks: held, free, known."""

import pytest

from sluice.engine.request import Sampling
from sluice.engine.scheduling.blocks.manager import BlockManager, blocks_needed
from sluice.engine.scheduling.blocks.pool import FreeBlocks
from sluice.engine.sequence import Sequence, block_hash, root_hash


def try_hold(manager: BlockManager, sequence: Sequence, *, num_spare: int) -> int | None:
    """Give `sequence` its blocks; the cached tokens, or None if there are not enough blocks."""
    found = manager.lookup(sequence)
    return found.num_tokens if manager.try_hold(sequence, found, num_spare=num_spare) else None


def sequence_of(token_ids: list[int], *, salt: str = "") -> Sequence:
    return Sequence(
        id=0,
        request_id="r",
        choice=0,
        sampling=Sampling(),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        cache_salt=salt,
    )


def manager_with(num_blocks: int, *, block_size: int = 4, caches: bool = True) -> BlockManager:
    return BlockManager(num_blocks, block_size, enable_prefix_caching=caches)


def held(manager: BlockManager, token_ids: list[int], *, salt: str = "") -> Sequence:
    """A sequence that holds its blocks and has computed nothing but what was there."""
    sequence = sequence_of(token_ids, salt=salt)
    num_cached = try_hold(manager, sequence, num_spare=0)
    assert num_cached is not None
    sequence.num_computed_tokens = num_cached
    return sequence


def computed(manager: BlockManager, token_ids: list[int], *, salt: str = "") -> Sequence:
    """A sequence that holds its blocks, with all its tokens computed and published."""
    sequence = sequence_of(token_ids, salt=salt)
    assert try_hold(manager, sequence, num_spare=0) is not None
    manager.end_copy(sequence)
    sequence.num_computed_tokens = sequence.num_tokens
    manager.publish(sequence)
    return sequence


class TestGivenNumbersOfTokens:
    def test_when_blocks_are_counted_then_a_partial_block_counts_whole(self) -> None:
        assert [blocks_needed(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


class TestGivenAFreeList:
    def test_when_blocks_leave_anywhere_and_return_at_both_ends_then_the_order_is_kept(self) -> None:
        free = FreeBlocks(5)

        free.remove(2)
        first = free.pop()
        free.push_back(2)
        free.push_front(first)
        free.remove(4)

        assert list(free) == [0, 1, 3, 2]
        assert len(free) == 4

    def test_when_it_has_no_blocks_then_it_is_empty(self) -> None:
        assert list(FreeBlocks(0)) == []


class TestGivenAnEmptyCache:
    def test_when_a_sequence_is_too_large_then_nothing_changes(self) -> None:
        manager = manager_with(2)
        sequence = sequence_of(list(range(9)))

        assert try_hold(manager, sequence, num_spare=0) is None

        assert sequence.block_table == []
        assert manager.num_free_blocks == 2

    def test_when_spare_blocks_must_stay_then_they_do(self) -> None:
        manager = manager_with(3)

        assert try_hold(manager, sequence_of(list(range(8))), num_spare=2) is None
        assert try_hold(manager, sequence_of(list(range(8))), num_spare=1) == 0

    def test_when_a_sequence_grows_then_it_gets_only_the_blocks_that_it_lacks(self) -> None:
        manager = manager_with(3)
        sequence = sequence_of([1, 2, 3])
        try_hold(manager, sequence, num_spare=0)

        assert manager.try_grow(sequence, 4)
        assert len(sequence.block_table) == 1
        assert manager.try_grow(sequence, 12)
        assert (len(sequence.block_table), sequence.num_slots) == (3, 12)
        assert not manager.try_grow(sequence, 13)
        assert len(sequence.block_table) == 3


class TestGivenAComputedPrefix:
    """Ten tokens in blocks of four: two full blocks and a partial one."""

    def test_when_another_sequence_begins_alike_then_it_shares_the_full_blocks(self) -> None:
        manager = manager_with(8)
        first = computed(manager, list(range(10)))
        second = sequence_of([*range(8), 99, 98])

        assert try_hold(manager, second, num_spare=0) == 8

        assert second.block_table[:2] == first.block_table[:2]
        assert second.block_table[2] != first.block_table[2]
        assert manager.num_free_blocks == 4
        manager.check_invariants([first, second])

    def test_when_the_same_tokens_come_again_then_one_is_recomputed_in_a_copy(self) -> None:
        manager = manager_with(8)
        first = computed(manager, list(range(8)))

        second = held(manager, list(range(8)))

        assert second.num_computed_tokens == 7
        assert second.cow_sources == (first.block_table[1],)
        assert second.block_table[1] not in first.block_table
        manager.check_invariants([first, second])

    def test_when_a_block_in_the_middle_differs_then_what_follows_is_not_shared(self) -> None:
        manager = manager_with(8)
        computed(manager, [*range(12), 0])

        assert try_hold(manager, sequence_of([*range(4), 99, *range(5, 12), 0]), num_spare=0) == 4

    def test_when_the_salt_differs_then_nothing_is_shared(self) -> None:
        manager = manager_with(8)
        computed(manager, list(range(10)), salt="one tenant")

        assert try_hold(manager, sequence_of(list(range(10)), salt="another"), num_spare=0) == 0

    def test_when_caching_is_off_then_nothing_is_shared(self) -> None:
        manager = manager_with(8, caches=False)
        computed(manager, list(range(10)))

        assert try_hold(manager, sequence_of(list(range(10))), num_spare=0) == 0

    def test_when_the_step_has_not_succeeded_yet_then_nothing_is_found(self) -> None:
        manager = manager_with(8)
        try_hold(manager, sequence_of(list(range(10))), num_spare=0)

        assert manager.lookup(sequence_of(list(range(10)))).tables[0] == []

    def test_when_its_sequence_has_gone_then_it_is_still_found_and_counts_as_free(self) -> None:
        manager = manager_with(8)
        first = computed(manager, list(range(10)))
        blocks = list(first.block_table)
        manager.release(first)

        again = sequence_of([*range(8), 99, 98])

        assert manager.num_free_blocks == 8
        assert try_hold(manager, again, num_spare=0) == 8
        assert again.block_table[:2] == blocks[:2]

    def test_when_only_idle_cached_blocks_are_left_then_sharing_counts_them_once(self) -> None:
        manager = manager_with(3)
        manager.release(computed(manager, list(range(10))))
        again = sequence_of([*range(8), 99, 98])

        assert try_hold(manager, again, num_spare=1) is None
        assert try_hold(manager, again, num_spare=0) == 8

    def test_when_blocks_run_out_then_the_partial_one_goes_first_and_the_beginning_last(self) -> None:
        manager = manager_with(3)
        manager.release(computed(manager, list(range(10))))

        one_block = sequence_of([50])
        try_hold(manager, one_block, num_spare=0)
        assert len(manager.lookup(sequence_of(list(range(10)))).tables[0]) == 2
        manager.try_grow(one_block, 8)
        assert len(manager.lookup(sequence_of(list(range(10)))).tables[0]) == 1

    def test_when_unknown_blocks_come_back_later_then_they_still_go_first(self) -> None:
        manager = manager_with(4)
        known = computed(manager, list(range(9)))
        unknown = sequence_of([50])
        try_hold(manager, unknown, num_spare=0)
        manager.release(known)
        manager.release(unknown)

        try_hold(manager, sequence_of([60] * 8), num_spare=0)

        assert len(manager.lookup(sequence_of(list(range(9)))).tables[0]) == 2

    def test_when_its_own_sequence_comes_back_then_one_token_at_least_is_computed_again(self) -> None:
        manager = manager_with(8)
        whole = computed(manager, list(range(8)))
        manager.release(whole)

        assert try_hold(manager, whole, num_spare=0) == 7

    def test_when_it_is_retracted_then_it_is_not_found_again(self) -> None:
        manager = manager_with(8)
        first = computed(manager, list(range(10)))

        manager.retract(first)
        manager.release(first)

        assert manager.lookup(sequence_of(list(range(10)))).tables[0] == []
        manager.check_invariants([])


class TestGivenAFollower:
    """Ten tokens in blocks of four, whose sequence has gone: its last block has two."""

    def test_when_a_sequence_goes_on_from_there_then_it_takes_the_block_over(self) -> None:
        manager = manager_with(8)
        first = computed(manager, list(range(10)))
        blocks = list(first.block_table)
        manager.release(first)
        second = sequence_of(list(range(20)))

        assert manager.lookup(second).num_tokens == 10
        assert try_hold(manager, second, num_spare=0) == 10

        assert second.block_table[:3] == blocks
        manager.check_invariants([second])

    def test_when_it_was_taken_over_then_the_next_one_copies_it(self) -> None:
        manager = manager_with(16)
        manager.release(computed(manager, list(range(10))))
        second, third = held(manager, list(range(20))), held(manager, [*range(10), 99])

        assert (second.num_computed_tokens, third.num_computed_tokens) == (10, 10)
        assert second.cow_sources == ()
        assert third.cow_sources == (second.block_table[2],) != (third.block_table[2],)
        manager.check_invariants([second, third])

    def test_when_what_it_became_is_full_then_it_is_known_like_any_other(self) -> None:
        manager = manager_with(8)
        manager.release(computed(manager, list(range(10))))
        second = computed(manager, list(range(13)))

        assert manager.lookup(sequence_of(list(range(13)))).tables[0] == second.block_table[:3]

    def test_when_the_same_tokens_come_again_then_one_is_computed_for_its_logits(self) -> None:
        manager = manager_with(8)
        manager.release(computed(manager, list(range(10))))

        assert try_hold(manager, sequence_of(list(range(10))), num_spare=0) == 9

    def test_when_a_token_in_it_differs_then_it_is_copied_and_left_as_it_is(self) -> None:
        manager = manager_with(9)
        manager.release(computed(manager, list(range(10))))

        assert try_hold(manager, sequence_of([*range(9), 99, *range(10)]), num_spare=0) == 9
        assert manager.lookup(sequence_of(list(range(20)))).num_tokens == 10

    def test_when_another_one_is_left_after_the_same_tokens_then_the_last_is_found(self) -> None:
        manager = manager_with(8)
        manager.release(computed(manager, list(range(10))))
        manager.release(computed(manager, [*range(8), 99, 98]))

        assert manager.lookup(sequence_of([*range(8), 99, 98, 97])).num_tokens == 10
        assert manager.lookup(sequence_of(list(range(20)))).num_tokens == 8
        manager.check_invariants([])

    def test_when_blocks_run_out_then_it_is_used_again_and_found_no_more(self) -> None:
        manager = manager_with(3)
        manager.release(computed(manager, list(range(10))))
        try_hold(manager, sequence_of([50]), num_spare=0)

        assert manager.lookup(sequence_of(list(range(20)))).num_tokens == 8

    @pytest.mark.parametrize("goes_first", [True, False])
    def test_when_what_was_before_it_is_retracted_with_another_then_it_is_not_found(self, *, goes_first: bool) -> None:
        manager = manager_with(16)
        suspect = computed(manager, list(range(9)))
        sharing = computed(manager, list(range(10)))
        if goes_first:
            manager.release(sharing)
        manager.retract(suspect)
        manager.release(suspect)
        if not goes_first:
            manager.release(sharing)

        again = computed(manager, list(range(8)))

        assert manager.lookup(sequence_of(list(range(20)))).num_tokens == 8
        manager.check_invariants([again])

    def test_when_its_sequence_was_retracted_then_it_is_not_found(self) -> None:
        manager = manager_with(8)
        suspect = computed(manager, list(range(10)))
        manager.retract(suspect)
        manager.release(suspect)

        # What comes before it is known again, from another sequence.
        computed(manager, list(range(8)))

        assert manager.lookup(sequence_of(list(range(20)))).num_tokens == 8

    def test_when_caching_is_off_then_there_is_none(self) -> None:
        manager = manager_with(8, caches=False)
        manager.release(computed(manager, list(range(10))))

        assert try_hold(manager, sequence_of(list(range(20))), num_spare=0) == 0


class TestGivenABlockThatASequenceFills:
    """Ten tokens in blocks of four, whose sequence runs: its last block has two."""

    def test_when_others_share_tokens_of_it_then_each_has_a_copy_of_its_own(self) -> None:
        manager = manager_with(16)
        first = computed(manager, list(range(10)))

        others = [held(manager, [*range(9 + n), 99, 98]) for n in range(2)]

        assert [other.num_computed_tokens for other in others] == [9, 10]
        assert [other.cow_sources for other in others] == [(first.block_table[2],)] * 2
        assert len({sequence.block_table[2] for sequence in (first, *others)}) == 3
        manager.check_invariants([first, *others])

    def test_when_tokens_of_it_are_not_computed_then_they_are_not_found(self) -> None:
        manager = manager_with(16)
        first = held(manager, list(range(11)))
        first.num_computed_tokens = 9
        manager.publish(first)

        assert manager.lookup(sequence_of(list(range(20)))).num_tokens == 9

    def test_when_the_salt_differs_then_it_is_not_found(self) -> None:
        manager = manager_with(16)
        computed(manager, list(range(10)), salt="one tenant")
        computed(manager, list(range(8)), salt="another")

        assert manager.lookup(sequence_of(list(range(20)), salt="another")).num_tokens == 8

    def test_when_its_sequence_ends_before_the_copy_is_made_then_its_block_is_kept(self) -> None:
        manager = manager_with(6)
        first = computed(manager, list(range(10)))
        second = held(manager, [*range(10), 99])

        manager.retract(first)
        manager.release(first)

        assert manager.num_free_blocks == 6 - 3 - 1
        manager.check_invariants([second])
        manager.end_copy(second)
        assert manager.num_free_blocks == 6 - 3
        manager.check_invariants([second])

    def test_when_the_sequence_for_the_copy_goes_then_it_leaves_nothing_and_lets_go(self) -> None:
        manager = manager_with(6)
        first = computed(manager, list(range(10)))
        second = held(manager, [*range(10), 99])
        begun, copy = first.block_table[2], second.block_table[2]

        manager.release(second)
        manager.release(first)

        assert second.cow_sources == ()
        third = held(manager, [*range(10), 98])
        assert third.block_table[2] == begun != copy
        assert manager.num_free_blocks == 6 - 3
        manager.check_invariants([third])

    def test_when_the_copy_is_full_then_it_is_known_like_any_other(self) -> None:
        manager = manager_with(16)
        computed(manager, list(range(10)))
        second = computed(manager, [*range(10), 99, 98, 97])

        assert manager.lookup(sequence_of([*range(10), 99, 98, 97])).tables[0] == second.block_table[:3]


class TestGivenAFullBlockFromWhichAnotherDiffers:
    """Twelve tokens in blocks of four, and a sequence that shares ten of them."""

    def test_when_its_sequence_has_gone_then_it_is_copied_and_stays_known(self) -> None:
        manager = manager_with(6)
        first = computed(manager, list(range(12)))
        blocks = list(first.block_table)
        manager.release(first)

        second = held(manager, [*range(10), 99])

        assert (second.num_computed_tokens, second.cow_sources) == (10, (blocks[2],))
        assert manager.lookup(sequence_of(list(range(13)))).tables[0] == blocks
        manager.check_invariants([second])

    @pytest.mark.parametrize("num_free", [1, 0])
    def test_when_there_is_no_room_to_keep_it_then_it_is_taken_over_and_known_no_more(self, num_free: int) -> None:
        manager = manager_with(3 + num_free)
        first = computed(manager, list(range(12)))
        blocks = list(first.block_table)
        manager.release(first)

        second = held(manager, [*range(10), 99])

        assert (second.num_computed_tokens, second.cow_sources, second.block_table) == (10, (), blocks)
        assert manager.num_free_blocks == num_free
        assert manager.lookup(sequence_of(list(range(13)))).num_tokens == 10
        manager.check_invariants([second])

    def test_when_blocks_run_out_then_the_source_of_a_copy_is_not_among_those_used(self) -> None:
        manager = manager_with(6)
        first = computed(manager, list(range(12)))
        blocks = list(first.block_table)
        manager.release(first)
        second = held(manager, [*range(10), 99])

        third = held(manager, [50] * 8)

        assert blocks[2] not in third.block_table + second.block_table
        assert manager.num_free_blocks == 0
        assert try_hold(manager, sequence_of([60]), num_spare=0) is None
        manager.check_invariants([second, third])


class TestGivenHashes:
    def test_when_they_are_made_in_any_process_then_they_are_the_same(self) -> None:
        assert root_hash("") == 0x2B2B001D68CE0378311369F123C779F7
        assert block_hash(root_hash("salt"), [1, 2, 3, 4]) == 0xB4ABAE21451EC1FBAF81161E5393A944
