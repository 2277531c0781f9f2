"""The set of timers is shared by all tenants: a timer takes effect when the job's or batch's own time has come."""

import pytest
from redis.exceptions import ResponseError

from sluice.protocol import calls
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, check, short


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


class TestGivenAScoreThatIsNoTime:
    @pytest.mark.parametrize("name", ["timers", "alive"])
    def test_when_a_call_says_when_the_next_is_due_then_it_is_not_then(self, queue: Queue, name: str) -> None:
        worker = queue.worker("A")
        worker.beat()
        for score in (1e300, float("inf")):
            queue.client.zadd(queue.keys.key(name), {"x|0.t.a": score})

            assert worker.maintain().due_ms is None
            assert worker.pull_only().due_ms is None


class TestGivenAClockOfAnotherType:
    def test_when_a_timer_is_due_then_the_call_is_refused_before_it_changes_anything(self, queue: Queue) -> None:
        queue.add("a", not_before_ms=queue.look().server_ms + 500)
        queue.pass_time(600)
        queue.client.delete(queue.keys.key("clock"))
        queue.client.set(queue.keys.key("clock"), "x")

        with pytest.raises(ResponseError, match="WRONGTYPE"):
            queue.fire_timers()

        queue.client.delete(queue.keys.key("clock"))
        check(queue)
        assert queue.fire_timers() == 1
        assert short(queue.worker("A").pull().jobs) == ["a"]
