"""A client that waits for overdue jobs names them, so that they end however many timers are due."""

from sluice.protocol import calls, limits
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, check, new_job


class TestGivenJobsWhoseTimeHasPassed:
    def test_when_one_is_named_then_it_ends_though_many_timers_are_due(self, queue: Queue) -> None:
        num_due = 2 * limits.SLICE_JOBS
        queue.submit(*[new_job(f"j{i}", ttl_ms=5) for i in range(num_due)])
        mine = queue.add("mine", ttl_ms=10)
        later = queue.add("later", ttl_ms=10_000, deadline_ms=queue.now_ms + 20_000)
        queue.pass_time(10)

        queue.run(calls.maintain(queue.keys, overdue=[mine, later, JobId("0.t.unknown"), JobId("nonsense")]))

        assert (queue.state(mine), queue.state(later)) == (JobState.EXPIRED, JobState.QUEUED)
        assert queue.view(later).expires_in_ms == 9990
        check(queue)

    def test_when_a_job_is_read_then_it_says_when_it_expires(self, queue: Queue) -> None:
        timed = queue.add("timed", ttl_ms=1000, deadline_ms=queue.now_ms + 5000)
        untimed = queue.add("untimed")
        assert queue.view(timed).expires_in_ms == 1000
        assert queue.view(untimed).expires_in_ms is None

        worker = queue.worker("A")
        worker.pull()
        queue.pass_time(6000)
        assert queue.view(timed).expires_in_ms == -1000, "its time to live ended with its start"

        queue.cancel(timed)
        assert queue.view(timed).expires_in_ms is None, "it has ended"
