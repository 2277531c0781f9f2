"""The set of timers is shared by all tenants: a timer takes effect when the job's or batch's own time has come."""

import pytest

from sluice.protocol import calls
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, check


def score_of(queue: Queue, member: str) -> float | None:
    return queue.client.zscore(queue.keys.key("timers"), member)


class TestGivenTimersOfAnotherUser:
    @pytest.mark.parametrize("kind", ["deadline", "ttl", "not_before", "retry"])
    def test_when_the_job_has_no_such_time_then_nothing_happens(self, queue: Queue, kind: str) -> None:
        waiting, running = queue.add("waiting", "victim"), queue.add("running", "victim", priority=9)
        worker = queue.worker("A")
        assert [job.id for job in worker.pull(sequences=1).jobs] == [running]
        for job_id in (waiting, running):
            queue.client.zadd(queue.keys.key("timers"), {f"{kind}|{job_id}": 1})

        queue.fire_timers()

        assert [queue.state(one) for one in (waiting, running)] == [JobState.QUEUED, JobState.RUNNING]
        assert worker.beat(running).stops == ()
        assert queue.client.zcard(queue.keys.key("timers")) == 0
        check(queue)

    @pytest.mark.parametrize(
        ("kind", "field"), [("deadline", "deadline_ms"), ("ttl", "ttl_ms"), ("not_before", "not_before_ms")]
    )
    def test_when_it_moved_a_timer_then_it_still_fires_at_the_jobs_time(
        self, queue: Queue, kind: str, field: str
    ) -> None:
        at_ms = queue.now_ms + 1000
        job_id = queue.add("one", "victim", **{field: 1000 if kind == "ttl" else at_ms})
        queue.client.zadd(queue.keys.key("timers"), {f"{kind}|{job_id}": 1})

        queue.fire_timers()
        assert score_of(queue, f"{kind}|{job_id}") == at_ms
        assert queue.state(job_id) is JobState.QUEUED
        queue.pass_time(1000)
        queue.fire_timers()

        assert queue.state(job_id) is (JobState.QUEUED if kind == "not_before" else JobState.EXPIRED)
        assert bool(queue.fields("victim", "one").get("entry")) is (kind == "not_before")
        check(queue)

    def test_when_it_names_a_batch_then_the_batch_keeps_its_own_deadline(self, queue: Queue) -> None:
        one, two = queue.add("one", "victim", batch="timed"), queue.add("two", "victim", batch="open")
        queue.run(calls.expire_batch(queue.keys, "timed", deadline_ms=queue.now_ms + 1000))
        queue.client.zadd(queue.keys.key("timers"), {"batch|timed": 1, "batch|open": 1})

        queue.fire_timers()
        assert [queue.state(job) for job in (one, two)] == [JobState.QUEUED] * 2
        assert queue.hash_of("batch", "open").get("closed") is None
        queue.pass_time(1000)
        queue.fire_timers()

        assert [queue.state(job) for job in (one, two)] == [JobState.EXPIRED, JobState.QUEUED]
        assert JobId("0.victim.two") == two
        check(queue)
