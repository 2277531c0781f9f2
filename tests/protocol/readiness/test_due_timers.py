"""More timers are due than one call fires: the most urgent fire first."""

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.states import JobState
from tests.protocol.driving import Queue, check, new_job

NUM_DUE = limits.SORTED_TIMERS + 2 * limits.SLICE_JOBS


def let_many_be_due(queue: Queue, **timers: int) -> None:
    """Make more timers due than one call sorts, each an older one than those added later."""
    jobs = [new_job(f"j{i}", "bulk", priority=0, **timers) for i in range(NUM_DUE)]
    for first in range(0, NUM_DUE, limits.MAX_JOBS_PER_CALL):
        queue.submit(*jobs[first : first + limits.MAX_JOBS_PER_CALL])


class TestGivenManyDueTimers:
    @pytest.mark.parametrize("timer", ["ttl_ms", "not_before_ms"])
    def test_when_an_urgent_job_becomes_due_then_it_waits_for_two_calls(self, one_queue: Queue, timer: str) -> None:
        queue = one_queue
        let_many_be_due(queue, **{timer: 10 if timer == "ttl_ms" else queue.now_ms + 10})
        queue.add("urgent", "victim", priority=9, not_before_ms=queue.now_ms + 11)
        queue.pass_time(11)

        fired = [queue.fire_timers() for _ in range(2)]

        assert fired == [limits.SLICE_JOBS] * 2
        assert queue.fields("victim", "urgent").get("entry")
        check(queue)

    def test_when_a_batch_ends_then_its_running_jobs_are_asked_first(self, one_queue: Queue) -> None:
        queue = one_queue
        job_id, worker = queue.add("running", "victim", batch="b"), queue.worker("A")
        worker.take()
        let_many_be_due(queue, ttl_ms=10)
        queue.run(calls.expire_batch(queue.keys, "b", deadline_ms=queue.now_ms + 11))
        queue.pass_time(11)

        queue.fire_timers()
        queue.fire_timers()

        assert worker.beat(job_id).stops == ((job_id, JobState.EXPIRED),)

    def test_when_a_running_job_is_past_its_deadline_then_it_is_asked_first(self, one_queue: Queue) -> None:
        queue = one_queue
        job_id, worker = queue.add("running", "victim", deadline_ms=queue.now_ms + 11), queue.worker("A")
        worker.take()
        let_many_be_due(queue, ttl_ms=10)
        queue.pass_time(11)

        queue.fire_timers()
        queue.fire_timers()

        assert worker.beat(job_id).stops == ((job_id, JobState.EXPIRED),)

    def test_when_less_urgent_ones_are_due_for_hours_then_they_go_first(self, one_queue: Queue) -> None:
        queue = one_queue
        let_many_be_due(queue, ttl_ms=10)
        queue.pass_time(11 * limits.TIMER_STEP_MS)
        queue.fire_timers()
        queue.add("urgent", "victim", priority=9, not_before_ms=queue.now_ms + 1)
        queue.pass_time(1)

        queue.fire_timers()
        queue.fire_timers()

        assert not queue.fields("victim", "urgent").get("entry")

    def test_when_all_have_fired_then_none_is_left(self, queue: Queue) -> None:
        let_many_be_due(queue, ttl_ms=10)
        queue.pass_time(10)
        assert queue.run(calls.maintain(queue.keys)).num_fired == limits.SLICE_JOBS

        while queue.fire_timers():
            pass

        assert queue.look().totals["expired"] == NUM_DUE
        assert queue.names("timers") == set()
