"""A running job that must stop ends without its owner once that is dead, whatever other workers may do."""

from collections.abc import Callable

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.calls import Ok, Replaced
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, Worker, check, ending, new_job, short, tokens
from tests.servers import RedisServer

LIFE_MS, BEAT_MS = int(limits.HEARTBEAT_LIFETIME_S * 1000), int(limits.BEAT_EVERY_S * 1000)
NO_ROOM = {"kv_tokens": 0, "prefill_tokens": 0, "sequences": 0}

Stop = Callable[[Queue, JobId], object]


def fire_deadline(queue: Queue, job_id: JobId) -> None:
    queue.write_fields(job_id, deadline=queue.now_ms)
    queue.client.zadd(queue.keys.key("timers"), {"deadline|0.t.a": queue.now_ms})
    queue.fire_timers()


def expire_batch(queue: Queue, _job_id: JobId) -> None:
    queue.run(calls.expire_batch(queue.keys, "b", deadline_ms=queue.now_ms))
    queue.fire_timers()


STOPS: dict[str, tuple[Stop, JobState]] = {
    "cancel": (lambda queue, job_id: queue.cancel(job_id, reason="enough"), JobState.CANCELLED),
    "batch": (lambda queue, _: queue.run(calls.cancel_batch(queue.keys, "b", reason="enough")), JobState.CANCELLED),
    "deadline": (fire_deadline, JobState.EXPIRED),
    "batch deadline": (expire_batch, JobState.EXPIRED),
}


def running(queue: Queue) -> tuple[Worker, calls.LeasedJob]:
    """A job that A has taken; it has three tokens, and A beats as it publishes them."""
    queue.add("a", batch="b")
    worker = queue.worker("A")
    job = worker.take()
    worker.beat(job.id)
    worker.advance(tokens(job, 0, 3))
    return worker, job


class TestGivenAJobOfADeadOwner:
    """No other worker reclaims: none is there."""

    @pytest.mark.parametrize("kind", STOPS)
    @pytest.mark.parametrize("has_other", [True, False], ids=["others beat", "nobody beats"])
    def test_when_it_is_to_stop_then_it_ends_at_once(self, queue: Queue, kind: str, *, has_other: bool) -> None:
        owner, job = running(queue)
        move_on = queue.pass_time if has_other else queue.step_clock
        move_on(LIFE_MS + 1)

        stop, state = STOPS[kind]
        stop(queue, job.id)

        view = queue.view(job.id)
        assert (view.state, view.published, view.owner) == (state, (3,), None)
        assert state is JobState.EXPIRED or view.error == "enough"
        assert owner.advance(tokens(job, 3, 1)) == [Replaced()], "a zombie is fenced"
        assert owner.beat(job.id).lost == (job.id,)
        check(queue)

    def test_when_it_is_cancelled_then_the_answer_is_the_state(self, queue: Queue) -> None:
        _, job = running(queue)
        queue.pass_time(LIFE_MS + 1)

        assert queue.cancel(job.id) == ["cancelled"]
        assert queue.cancel(job.id) == ["cancelled"]

    def test_when_its_end_is_reported_then_a_cancel_need_not_wait_for_its_lifetime(self, queue: Queue) -> None:
        _, job = running(queue)
        queue.run(calls.report_death(queue.keys, "A"))

        assert queue.cancel(job.id) == ["cancelled"]

    def test_when_a_key_of_its_owner_is_foreign_then_the_owner_is_asked(self, queue: Queue) -> None:
        _, job = running(queue)
        queue.pass_time(LIFE_MS + 1)
        queue.client.delete(queue.keys.key("worker", "A"))
        queue.client.set(queue.keys.key("worker", "A"), "x")

        assert queue.cancel(job.id) == ["asked"]

    def test_when_it_ends_then_its_mates_still_know_that_they_were_not_alone(self, queue: Queue) -> None:
        queue.submit(new_job("a"), new_job("b"))
        dead = queue.worker("A")
        dead.pull()
        queue.pass_time(LIFE_MS + 1)
        queue.cancel(JobId("0.t.a"))

        queue.worker("B").pull()

        [death] = queue.view(JobId("0.t.b")).deaths
        assert (death.incarnation, death.mates) == ("A", 1)
        assert queue.client.pttl(queue.keys.key("worker", "A")) > 0
        check(queue)


class TestGivenAJobThatWasAskedToStop:
    """Its owner lives, and dies before it has stopped it."""

    def given(self, queue: Queue, kind: str) -> tuple[Worker, calls.LeasedJob]:
        owner, job = running(queue)
        STOPS[kind][0](queue, job.id)
        assert queue.view(job.id).asked is STOPS[kind][1]
        return owner, job

    @pytest.mark.parametrize("kind", STOPS)
    @pytest.mark.parametrize("is_paused", [True, False], ids=["paused", "full"])
    def test_when_another_worker_may_not_reclaim_then_the_job_ends(
        self, queue: Queue, kind: str, *, is_paused: bool
    ) -> None:
        _, job = self.given(queue, kind)
        other = queue.worker("B")
        if is_paused:
            queue.pause()
        for _ in range(2 * (LIFE_MS + BEAT_MS) // BEAT_MS):
            queue.step_clock(BEAT_MS)
            other.beat()
            assert other.pull(**({} if is_paused else NO_ROOM)).jobs == ()

        assert queue.state(job.id) is STOPS[kind][1]
        check(queue)

    def test_when_its_owners_end_is_reported_then_the_worker_that_reclaims_ends_it(self, queue: Queue) -> None:
        """Its timer is not due yet."""
        _, job = self.given(queue, "cancel")
        queue.run(calls.report_death(queue.keys, "A"))

        assert queue.worker("B").pull().jobs == ()

        assert queue.state(job.id) is JobState.CANCELLED
        check(queue)

    def test_when_timers_are_fired_without_any_worker_then_the_job_ends(self, queue: Queue) -> None:
        _, job = self.given(queue, "cancel")
        queue.step_clock(LIFE_MS)
        queue.fire_timers()
        assert queue.state(job.id) is JobState.RUNNING

        queue.step_clock(BEAT_MS)
        queue.fire_timers()

        assert queue.state(job.id) is JobState.CANCELLED
        assert queue.names("timers") == set()

    def test_when_its_owner_lives_on_then_the_owner_ends_it(self, queue: Queue) -> None:
        owner, job = self.given(queue, "cancel")
        for _ in range(12):
            queue.step_clock(BEAT_MS)
            assert owner.beat(job.id).stops == ((job.id, JobState.CANCELLED),)
            queue.fire_timers()

        assert owner.advance(ending(job, 3, state=JobState.CANCELLED)) == [Ok(stop=JobState.CANCELLED)]
        assert queue.names("timers") == set()
        check(queue)

    def test_when_the_clock_steps_back_then_it_is_looked_at_within_a_lifetime(self, queue: Queue) -> None:
        _, job = self.given(queue, "cancel")
        other = queue.worker("B")
        queue.step_clock(-3_600_000)
        queue.client.delete(queue.keys.key("timers"))
        queue.cancel(job.id)
        for _ in range(2 * LIFE_MS // BEAT_MS + 2):
            queue.step_clock(BEAT_MS)
            other.beat()

        assert queue.state(job.id) is JobState.CANCELLED

    def test_when_it_is_asked_again_in_another_way_then_the_first_stands(self, queue: Queue) -> None:
        _, job = self.given(queue, "cancel")
        queue.pass_time(LIFE_MS + 1)

        fire_deadline(queue, job.id)

        view = queue.view(job.id)
        assert (view.state, view.error) == (JobState.CANCELLED, "enough")

    def test_when_the_queue_is_read_then_the_look_is_no_deadline(self, queue: Queue) -> None:
        self.given(queue, "cancel")

        assert queue.look().deadline_ms is None


class TestGivenARedisThatWasAway:
    @pytest.mark.slow
    def test_when_it_is_back_then_the_owner_is_asked(self, durable_valkey: RedisServer) -> None:
        """It could not beat meanwhile. The queue's clock is the server's own here."""
        with durable_valkey.client() as client:
            queue = Queue(client)
            _, job = running(queue)
            client.zadd(queue.keys.key("alive"), {"A": 1})  # its next heartbeat was due as Redis went away
        durable_valkey.restart()
        with durable_valkey.client() as client:
            queue = Queue(client)

            assert queue.cancel(job.id) == ["asked"]
            queue.stop_clock()
            assert queue.cancel(job.id) == ["cancelled"]


class TestGivenADeadOwnerAndAPausedQueue:
    def test_when_nobody_asked_its_job_to_stop_then_it_waits(self, queue: Queue) -> None:
        _, job = running(queue)
        queue.pause()
        queue.pass_time(3 * LIFE_MS)
        other = queue.worker("B")
        other.beat()

        assert other.pull().jobs == ()
        assert queue.state(job.id) is JobState.QUEUED
        queue.resume()
        assert short(other.pull().jobs) == ["a"]
        check(queue)
