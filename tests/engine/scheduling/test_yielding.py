"""Running sequences give way to waiting ones of a higher class, when that lets them join."""

from typing import Any

import pytest

from sluice.engine.batch import Batch, ScheduledRow
from sluice.engine.request import NO_ROOM, Room, Sampling
from sluice.engine.scheduling.policies import MAX_YIELDS
from sluice.engine.scheduling.scheduler import Scheduler
from sluice.engine.sequence import Sequence, SequenceStatus
from tests.engine.scheduling.test_scheduler import added, scheduler_with, shares, step


def full_of(num_running: int, **options: Any) -> tuple[Scheduler, list[Sequence]]:
    """A scheduler whose places sequences of class 0 have, each with three tokens of prompt."""
    places: dict[str, Any] = {"max_num_seqs": num_running, "max_num_batched_tokens": 64}
    scheduler = scheduler_with(**places | options)
    running = [added(scheduler, 3) for _ in range(num_running)]
    step(scheduler)
    return scheduler, running


def ids(batch: Batch) -> list[int]:
    return [row.sequence_id for row in batch.rows]


class TestGivenEveryPlaceTaken:
    """Eight sequences of class 0 run, and blocks are free."""

    def test_when_one_of_a_higher_class_comes_then_it_joins_the_next_step(self) -> None:
        scheduler, running = full_of(8)
        urgent = added(scheduler, 4, priority=100)

        batch = step(scheduler)

        assert shares(batch) == [(urgent, 4), *((one, 1) for one in running[:-1])]
        assert running[-1].status is SequenceStatus.WAITING
        assert [one.num_yields for one in running] == [0] * 7 + [1]

    def test_when_the_policy_is_fcfs_then_it_waits_for_a_place(self) -> None:
        scheduler, running = full_of(8, policy="fcfs")
        urgent = added(scheduler, 4, priority=100)

        for _ in range(20):
            assert urgent.id not in ids(step(scheduler))
        scheduler.finish([running[0]])

        assert urgent.id in ids(step(scheduler))

    def test_when_one_of_the_same_class_comes_then_none_gives_way(self) -> None:
        scheduler, running = full_of(2)
        added(scheduler, 1)

        for _ in range(5):
            assert ids(step(scheduler)) == [one.id for one in running]

    def test_when_the_higher_one_has_ended_then_the_victim_returns(self) -> None:
        scheduler, running = full_of(2)
        urgent = added(scheduler, 4, priority=1)
        for _ in range(5):
            step(scheduler)

        scheduler.finish([urgent])

        assert ids(step(scheduler)) == [one.id for one in running]
        assert scheduler.counters.num_preemptions == 1

    def test_when_it_gave_way_often_enough_then_it_runs_to_its_end(self) -> None:
        scheduler, [victim] = full_of(1)
        for _ in range(MAX_YIELDS):
            urgent = added(scheduler, 1, priority=1)
            assert ids(step(scheduler)) == [urgent.id]
            scheduler.finish([urgent])
            assert ids(step(scheduler)) == [victim.id]

        added(scheduler, 1, priority=1)

        assert ids(step(scheduler)) == [victim.id]
        assert scheduler.room() == NO_ROOM

    def test_when_its_prefix_is_being_computed_then_none_gives_way_before_it_is(self) -> None:
        scheduler = scheduler_with(max_num_seqs=2, max_num_batched_tokens=34, enable_prefix_caching=True, num_blocks=90)
        least = added(scheduler, 4)
        step(scheduler)
        first = added(scheduler, 100, token=5, priority=5)
        step(scheduler)
        urgent = added(scheduler, 100, token=5, priority=9)

        assert urgent.id not in ids(step(scheduler))
        assert least.num_yields == 0
        while first.num_uncomputed_tokens > 1:
            step(scheduler)

        assert ids(step(scheduler)) == [urgent.id, first.id]
        assert least.num_yields == 1

    def test_when_a_step_with_the_victim_is_in_flight_then_it_leaves_when_that_lands(self) -> None:
        scheduler, running = full_of(2)
        in_flight = scheduler.schedule()
        scheduler.launch(in_flight)
        urgent = added(scheduler, 4, priority=1)

        batch = scheduler.schedule()

        assert ids(batch) == [urgent.id, running[0].id]
        assert running[1].status is SequenceStatus.LEAVING
        scheduler.check_invariants()


class TestGivenALongPromptThatIsComputed:
    """It would take the whole budget of the next steps."""

    def test_when_one_of_a_higher_class_comes_then_its_prompt_is_computed_first(self) -> None:
        scheduler = scheduler_with()
        long = added(scheduler, 100)
        step(scheduler)
        urgent = added(scheduler, 10, priority=1)

        assert shares(step(scheduler)) == [(urgent, 10), (long, 6)]

    def test_when_one_of_its_class_comes_then_it_waits_for_the_budget(self) -> None:
        scheduler = scheduler_with()
        long = added(scheduler, 100)
        step(scheduler)
        added(scheduler, 10)

        assert shares(step(scheduler)) == [(long, 16)]


class TestGivenAFullCache:
    """Three sequences of class 0 hold all but two blocks of four tokens; places are free."""

    def full(self, **options: Any) -> tuple[Scheduler, list[Sequence]]:
        scheduler = scheduler_with(num_blocks=14, max_num_seqs=8, max_num_batched_tokens=64, **options)
        running = [added(scheduler, 15) for _ in range(3)]
        step(scheduler)
        return scheduler, running

    def test_when_one_of_a_higher_class_needs_blocks_then_as_many_give_way_as_it_needs(self) -> None:
        scheduler, running = self.full()
        urgent = added(scheduler, 20, priority=1)

        assert ids(step(scheduler)) == [urgent.id, running[0].id]
        assert [one.num_yields for one in running] == [0, 1, 1]

    def test_when_all_blocks_would_not_do_then_none_gives_way(self) -> None:
        scheduler, running = self.full()
        first = added(scheduler, 12, priority=2)
        step(scheduler)
        assert running[-1].num_yields == 1
        urgent = added(scheduler, 50, priority=1)

        step(scheduler)

        assert urgent.status is SequenceStatus.WAITING
        assert [one.num_yields for one in running] == [0, 0, 1]
        assert scheduler.running == [first, *running[:2]]

    def test_when_it_needs_the_whole_cache_then_it_gets_it(self) -> None:
        scheduler, running = self.full()
        urgent = added(scheduler, 14 * 4, priority=1)

        assert ids(step(scheduler)) == [urgent.id]
        assert [one.num_yields for one in running] == [1, 1, 1]

    def test_when_blocks_are_shared_then_those_that_stay_held_are_not_counted(self) -> None:
        scheduler = scheduler_with(num_blocks=15, max_num_batched_tokens=64, enable_prefix_caching=True)
        first = added(scheduler, 41, token=1)
        step(scheduler)
        second = added(scheduler, 41, token=1)
        step(scheduler)
        assert first.block_table[:10] == second.block_table[:10]
        urgent = added(scheduler, 9, priority=1)

        step(scheduler)

        assert urgent.status is SequenceStatus.RUNNING
        assert (first.num_yields, second.num_yields) == (0, 1)

    @pytest.mark.parametrize("num_prompt_tokens", [20, 56])
    def test_when_steps_overlap_then_it_joins_when_the_victims_have_landed(self, num_prompt_tokens: int) -> None:
        scheduler, running = self.full()
        in_flight = scheduler.schedule()
        scheduler.launch(in_flight)
        urgent = added(scheduler, num_prompt_tokens, priority=1)

        second = scheduler.schedule()
        scheduler.launch(second)
        assert urgent.status is SequenceStatus.WAITING
        num_yields = [one.num_yields for one in running]
        assert sum(num_yields) > 0
        scheduler.land(in_flight)
        third = scheduler.schedule()

        assert ids(third)[0] == urgent.id
        assert [one.num_yields for one in running] == num_yields
        scheduler.check_invariants()


class TestGivenASequenceThatGaveWay:
    """It did at 0 s, when a request of a higher class took its place."""

    def given(self, clock: list[float], **options: Any) -> tuple[Scheduler, Sequence]:
        scheduler, running = full_of(2, clock=lambda: clock[0], **options)
        added(scheduler, 4, priority=1)
        step(scheduler)
        assert running[1].status is SequenceStatus.WAITING
        return scheduler, running[1]

    def test_when_it_has_waited_for_long_enough_then_its_request_is_stalled(self) -> None:
        clock = [0.0]
        scheduler, victim = self.given(clock)
        assert scheduler.stalled_requests(2.0) == []

        clock[0] = 2.0

        assert scheduler.stalled_requests(2.0) == [victim.request_id]

    def test_when_another_sequence_of_its_request_runs_then_it_is_not(self) -> None:
        clock = [0.0]
        scheduler, victim = self.given(clock)
        scheduler.running[1].request_id = victim.request_id

        clock[0] = 2.0

        assert scheduler.stalled_requests(2.0) == []

    def test_when_it_runs_again_then_it_is_not_and_the_wait_begins_anew(self) -> None:
        clock = [0.0]
        scheduler, victim = self.given(clock)
        scheduler.finish([scheduler.running[0]])
        clock[0] = 1.0
        step(scheduler)
        assert victim.status is SequenceStatus.RUNNING
        added(scheduler, 4, priority=1)
        step(scheduler)

        clock[0] = 2.5

        assert victim.status is SequenceStatus.WAITING
        assert scheduler.stalled_requests(2.0) == []


class TestGivenRoomIsOfferedAhead:
    """Two of class 0 run, and one of them ends after the next two steps, for which room is offered."""

    @staticmethod
    def ends_soon(*, look_ahead: float = 2.0) -> tuple[Scheduler, list[Sequence]]:
        scheduler = scheduler_with(max_num_seqs=2, max_num_batched_tokens=64)
        running = [added(scheduler, 3, sampling=Sampling(max_tokens=count)) for count in (40, 3)]
        step(scheduler)
        scheduler.note_time(Batch((ScheduledRow(0, 0, 0, 1, True),)), 1.0)
        scheduler.look_ahead(look_ahead)
        return scheduler, running

    def test_when_one_has_come_for_that_place_then_no_more_is_offered_and_it_waits(self) -> None:
        scheduler, _ = self.ends_soon()
        before = scheduler.room().sequences
        added(scheduler, 3)

        assert before == 1
        assert scheduler.room().over_class == 0

    def test_when_one_of_a_higher_class_comes_a_step_before_then_it_waits_for_that_place(self) -> None:
        scheduler, running = self.ends_soon()
        step(scheduler)
        urgent = added(scheduler, 3, priority=7)

        assert ids(step(scheduler)) == [one.id for one in running]
        scheduler.finish([running[1]])
        assert ids(step(scheduler)) == [urgent.id, running[0].id]
        assert scheduler.counters.num_preemptions == 0

    def test_when_it_comes_earlier_then_one_gives_way_at_once(self) -> None:
        scheduler, running = self.ends_soon()
        urgent = added(scheduler, 3, priority=7)

        assert ids(step(scheduler)) == [urgent.id, running[0].id]

    def test_when_one_of_the_lowest_class_waits_too_then_none_gives_way_for_the_higher_one(self) -> None:
        scheduler, running = self.ends_soon()
        step(scheduler)
        added(scheduler, 3)
        urgent = added(scheduler, 3, priority=7)

        assert ids(step(scheduler)) == [one.id for one in running]
        scheduler.finish([running[1]])
        assert ids(step(scheduler)) == [urgent.id, running[0].id]

    def test_when_more_of_a_higher_class_have_come_than_places_then_others_give_way(self) -> None:
        scheduler, running = self.ends_soon()
        step(scheduler)
        urgent = [added(scheduler, 3, priority=7) for _ in range(2)]

        assert ids(step(scheduler)) == [one.id for one in urgent]
        assert [one.num_yields for one in running] == [1, 1]

    def test_when_no_room_is_offered_ahead_then_one_gives_way_at_once(self) -> None:
        scheduler, running = self.ends_soon(look_ahead=0.0)
        step(scheduler)
        urgent = added(scheduler, 3, priority=7)

        assert ids(step(scheduler)) == [urgent.id, running[0].id]

    @pytest.mark.parametrize("look_ahead", [0.0, 2.0, 12.0])
    def test_when_many_of_a_higher_class_wait_in_the_queue_then_all_run_soon(self, look_ahead: float) -> None:
        scheduler = scheduler_with(max_num_seqs=16, max_num_batched_tokens=64, num_blocks=512)
        running = [added(scheduler, 3, sampling=Sampling(max_tokens=60 + 9 * number)) for number in range(16)]
        scheduler.note_time(Batch((ScheduledRow(0, 0, 0, 1, True),)), 1.0)
        scheduler.look_ahead(look_ahead)
        while not running[0].ends_within(12):
            step(scheduler)

        in_queue, urgent, num_steps = 8, list[Sequence](), 0
        while len(urgent) < 8 or any(one.status is SequenceStatus.WAITING for one in urgent):
            num_taken = min(in_queue, scheduler.room().sequences)
            in_queue -= num_taken
            urgent += [added(scheduler, 3, priority=7) for _ in range(num_taken)]
            step(scheduler)
            num_steps += 1

        assert num_steps <= 3


class TestGivenARoomThatIsAskedFor:
    def test_when_places_are_free_then_it_is_for_every_class(self) -> None:
        scheduler, _ = full_of(2, num_blocks=64)
        scheduler.finish([scheduler.running[0]])

        assert scheduler.room().over_class is None

    def test_when_every_place_is_taken_then_it_is_what_the_lowest_class_would_give_up(self) -> None:
        scheduler = scheduler_with(max_num_seqs=3, max_num_batched_tokens=64, num_blocks=10)
        for priority in (5, 2, 2):
            added(scheduler, 5, priority=priority)
        step(scheduler)

        assert scheduler.room() == Room(
            kv_tokens=(4 + 2 * 2 - 3) * 4, prefill_tokens=128 - 1, sequences=2, over_class=2
        )

    def test_when_it_was_asked_for_and_the_running_ones_change_then_it_is_found_anew(self) -> None:
        scheduler = scheduler_with(max_num_seqs=3, max_num_batched_tokens=64, num_blocks=10)
        for priority in (5, 2, 2):
            added(scheduler, 5, priority=priority)
        step(scheduler)
        before = [scheduler.room() for _ in range(3)]

        scheduler.finish([scheduler.running[-1]])
        added(scheduler, 5, priority=5)
        step(scheduler)

        assert before[0] == before[2]
        assert (scheduler.room().sequences, scheduler.room().over_class) == (1, 2)

    def test_when_a_victim_waits_then_it_is_still_there_for_higher_classes(self) -> None:
        scheduler, _ = full_of(3)
        added(scheduler, 1, priority=7)
        step(scheduler)

        assert (scheduler.num_waiting, scheduler.room().over_class, scheduler.room().sequences) == (1, 0, 2)

    def test_when_one_waits_that_would_take_it_then_there_is_none(self) -> None:
        scheduler, _ = full_of(3)
        added(scheduler, 1, priority=7)

        assert scheduler.room() == NO_ROOM

    def test_when_the_policy_or_the_discipline_lets_none_give_way_then_there_is_none(self) -> None:
        assert full_of(3, policy="fcfs")[0].room() == NO_ROOM
        assert full_of(3, discipline="orca")[0].room() == NO_ROOM
