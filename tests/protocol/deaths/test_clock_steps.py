"""The server's clock steps, or another server with another clock takes over: heartbeats expire as before."""

import pytest

from sluice.protocol import calls
from sluice.protocol.limits import BEAT_EVERY_S, HEARTBEAT_LIFETIME_S
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.deaths.test_suspects import kill, pass_by
from tests.protocol.driving import Queue, Worker, check, ending, new_job, short

BEAT_MS, LIFE_MS = int(BEAT_EVERY_S * 1000), int(HEARTBEAT_LIFETIME_S * 1000)
STEPS_MS = (3_600_000, 1500, -1500, -1_800_000)


class TestGivenAClockThatSteps:
    """A and B beat every second; A holds a job."""

    @pytest.fixture
    def pair(self, queue: Queue) -> tuple[Worker, Worker]:
        first, second = queue.worker("A"), queue.worker("B")
        first.beat()
        second.beat()
        queue.add("one")
        first.take()
        first.beat(JobId("0.t.one"))
        return first, second

    @pytest.mark.parametrize("step_ms", STEPS_MS)
    def test_when_both_live_then_neither_is_taken_for_dead(
        self, queue: Queue, pair: tuple[Worker, Worker], step_ms: int
    ) -> None:
        first, second = pair
        for at in range(10):
            queue.step_clock(step_ms if at == 5 else BEAT_MS)

            assert second.pull().jobs == ()
            assert not first.beat(JobId("0.t.one")).was_dead
            assert not second.beat().was_dead
        assert len(queue.look().workers) == 2
        check(queue)

    @pytest.mark.parametrize("step_ms", STEPS_MS)
    @pytest.mark.parametrize("step_at", [0, 2])
    def test_when_one_died_then_its_job_moves_within_a_life_and_two_beats(
        self, queue: Queue, pair: tuple[Worker, Worker], step_ms: int, step_at: int
    ) -> None:
        second, waited_ms = pair[1], 0
        moved: list[str] = []
        while not moved:
            if waited_ms == step_at * BEAT_MS:
                queue.step_clock(step_ms)
            queue.step_clock(BEAT_MS)
            waited_ms += BEAT_MS
            second.beat()
            moved = short(second.pull().jobs)
            assert waited_ms <= LIFE_MS + 2 * BEAT_MS

        assert moved == ["one"]
        assert waited_ms >= LIFE_MS - 2 * BEAT_MS
        check(queue)

    def test_when_only_pulls_come_then_the_clock_of_heartbeats_stays(
        self, queue: Queue, pair: tuple[Worker, Worker]
    ) -> None:
        for _ in range(10):
            queue.step_clock(50)
            assert pair[1].pull().jobs == ()
        queue.step_clock(3_600_000)
        for _ in range(10):
            queue.step_clock(50)
            assert pair[1].pull().jobs == ()

        assert not pair[0].beat(JobId("0.t.one")).was_dead


def make_suspect(queue: Queue) -> None:
    """Let a job kill two workers."""
    queue.add("a")
    kill(queue, "A", "B")
    pass_by(queue, "C")
    assert queue.look().suspects == 1


class TestGivenAClockThatStepsBack:
    """By an hour, after a heartbeat."""

    BACK_MS = -3_600_000

    def test_when_a_job_waits_for_a_retry_then_it_waits_as_long_as_it_was_to(self, queue: Queue) -> None:
        worker = queue.worker("A")
        queue.add("a")
        worker.advance(ending(worker.take(), 0, state=JobState.FAILED, retry_in_ms=1000))
        worker.beat()
        queue.step_clock(self.BACK_MS)
        worker.beat()

        queue.step_clock(999)
        assert worker.pull().jobs == ()
        queue.step_clock(1)
        assert short(worker.pull().jobs) == ["a"]

    def test_when_a_retry_began_after_the_step_then_it_is_as_it_was(self, queue: Queue) -> None:
        worker = queue.worker("A")
        worker.beat()
        queue.step_clock(self.BACK_MS)
        queue.add("a")
        worker.advance(ending(worker.take(), 0, state=JobState.FAILED, retry_in_ms=5000))
        queue.step_clock(1000)
        worker.beat()
        queue.step_clock(3999)

        assert worker.pull().jobs == ()

    def test_when_many_are_delayed_then_all_are_shortened_a_slice_at_a_time(self, one_queue: Queue) -> None:
        queue, worker = one_queue, one_queue.worker("A")
        queue.submit(*[new_job(f"{number}") for number in range(200)])
        for _ in range(7):
            jobs = worker.pull().jobs
            worker.advance(*(ending(job, 0, state=JobState.FAILED, retry_in_ms=3000) for job in jobs))
        worker.beat()
        queue.step_clock(self.BACK_MS)
        for _ in range(3):
            worker.beat()
            queue.step_clock(1000)

        timers = queue.client.zrange(queue.keys.key("timers"), 0, -1, withscores=True)
        assert len(timers) == 200
        assert max(due for _, due in timers) <= queue.now_ms + 3000
        assert "stepped" not in queue.hash_of("clock")

    def test_when_the_owner_of_a_flagged_job_is_dead_then_the_job_ends_after_its_lifetime(self, queue: Queue) -> None:
        job_id, owner, other = queue.add("a"), queue.worker("A"), queue.worker("B")
        owner.take()
        owner.beat(job_id)
        other.beat()
        queue.cancel(job_id)
        queue.pause()  # no other worker reclaims
        queue.step_clock(self.BACK_MS)
        # It is looked at twice, each time at the first beat after a lifetime.
        for _ in range(1 + 2 * (LIFE_MS // BEAT_MS + 1)):
            queue.step_clock(BEAT_MS)
            other.beat()

        assert queue.state(job_id) is JobState.CANCELLED
        assert not {"stepped", "stepped_timers"} & queue.hash_of("clock").keys()
        check(queue)

    def test_when_another_user_wrote_a_cursor_then_it_is_removed(self, queue: Queue) -> None:
        queue.worker("A").beat()
        queue.client.hset(queue.keys.key("clock"), mapping={"stepped": "x", "stepped_timers": "-1 "})
        queue.step_clock(1000)

        queue.worker("A").beat()

        assert not {"stepped", "stepped_timers"} & queue.hash_of("clock").keys()

    def test_when_a_batch_has_begun_to_expire_then_its_next_slice_does(self, queue: Queue) -> None:
        worker = queue.worker("A")
        queue.submit(*[new_job(f"j{i:02}", batch="b") for i in range(40)])
        queue.submit(new_job("later", batch="c"))
        for batch, in_ms in (("b", 0), ("c", 10_000)):
            queue.run(calls.expire_batch(queue.keys, batch, deadline_ms=queue.now_ms + in_ms))
        worker.beat()
        assert 1 < queue.look().waiting_jobs < 41
        queue.step_clock(self.BACK_MS)
        for _ in range(2):
            worker.beat()
            queue.step_clock(1000)

        assert queue.look().waiting_jobs == 1, "the other batch is not due"
        assert queue.client.zrange(queue.keys.key("timers"), 0, -1) == [b"batch|c"]

    def test_when_a_full_worker_asks_then_a_job_of_before_is_not_left_to_idle_ones(self, queue: Queue) -> None:
        first, second = queue.worker("A"), queue.worker("B")
        queue.add("high", priority=9)
        queue.step_clock(self.BACK_MS)
        first.beat()
        second.beat()

        assert short(first.pull(over_class=0).jobs) == ["high"]

    def test_when_a_suspect_waits_then_the_next_worker_drains_for_it(self, queue: Queue) -> None:
        make_suspect(queue)
        queue.step_clock(self.BACK_MS)
        worker = queue.worker("D")
        worker.beat()

        assert worker.pull().drain_for_suspects
        assert short(worker.pull(is_empty=True).jobs) == ["a"]

    def test_when_a_worker_drained_for_suspects_before_then_another_may(self, queue: Queue) -> None:
        make_suspect(queue)
        claim = f"gone {queue.now_ms + 4000} {new_job('a').id}"
        queue.client.set(queue.keys.key("isolator"), claim)
        queue.step_clock(self.BACK_MS)
        worker = queue.worker("D")
        worker.beat()

        assert worker.pull().drain_for_suspects
