"""Decisions "Pulls are numbered", "Cost and room", "Waking and taking", and what a pull does with what is not ours."""

from typing import Any, ClassVar

import pytest
import redis

from sluice.protocol import limits
from sluice.protocol.calls import Ok
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, Worker, check, ending, new_job, short, tokens


@pytest.mark.every_server
class TestGivenWaitingJobs:
    def test_when_a_worker_pulls_then_it_gets_them_whole(self, queue: Queue) -> None:
        job_id = queue.add("a", seed=2**64 - 1, choices=2, priority=3, deadline_ms=9_007_199_254_740_991)

        job = queue.worker("A").take()

        assert (job.id, job.seed, job.choices, job.priority) == (job_id, 2**64 - 1, 2, 3)
        assert (job.epoch, job.attempt, job.published, job.ended) == (1, 1, (0, 0), (False, False))
        assert (job.deadline_ms, job.prompt_tokens) == (9_007_199_254_740_991, 10)
        assert (job.spec, job.payload) == (new_job("a").spec, new_job("a").payload)
        assert (job.fits, job.resumed_from, job.fingerprint) == (True, None, None)
        assert queue.state(job_id) is JobState.RUNNING
        check(queue)

    def test_when_two_workers_pull_then_each_job_goes_to_one(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i}") for i in range(limits.PULL_JOBS + 8)])

        first, second = queue.worker("A").pull(), queue.worker("B").pull()

        assert (len(first.jobs), len(second.jobs)) == (limits.PULL_JOBS, 8)
        assert {j.id for j in first.jobs}.isdisjoint({j.id for j in second.jobs})
        check(queue)

    def test_when_a_worker_pulls_then_the_leases_are_no_list_to_be_searched_for_each(self, queue: Queue) -> None:
        queue.add("a")

        queue.worker("A").take()

        leases = queue.keys.key("held", "A")
        assert queue.client.object("encoding", leases) == b"hashtable"
        assert queue.client.hlen(leases) == 1

    def test_when_more_wait_than_a_bite_then_it_says_so(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i}") for i in range(limits.PULL_JOBS + 8)])
        worker = queue.worker("A")

        first, second = worker.pull(), worker.pull()

        assert (len(first.jobs), first.has_more) == (limits.PULL_JOBS, True)
        assert (len(second.jobs), second.has_more) == (8, False)

    def test_when_prompts_are_large_then_the_bite_ends_by_bytes(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i}", payload=b"x" * 400_000) for i in range(5)])

        reply = queue.worker("A").pull()

        assert (len(reply.jobs), reply.has_more) == (3, True)
        check(queue)

    def test_when_the_queue_is_paused_then_nothing_is_taken_but_timers_fire(self, queue: Queue) -> None:
        queue.add("a")
        late = queue.add("late", ttl_ms=10)
        queue.pause()
        queue.pass_time(20)

        reply = queue.worker("A").pull()

        assert (reply.jobs, reply.is_paused) == ((), True)
        assert queue.state(late) is JobState.EXPIRED
        queue.resume()
        assert short(queue.worker("A").pull().jobs) == ["a"]


class TestGivenRoomForSome:
    """A job costs 30 tokens: 10 of prompt and 20 of output."""

    @pytest.mark.parametrize(
        "room", [{"kv_tokens": 60}, {"prefill_tokens": 20}, {"sequences": 2}], ids=["kv", "prefill", "sequences"]
    )
    def test_when_it_pulls_then_it_gets_what_fits_and_holds_the_next(self, queue: Queue, room: dict[str, int]) -> None:
        queue.submit(*[new_job(f"j{i}") for i in range(5)])

        reply = queue.worker("A").pull(**room)

        # Room is used up exactly: with none left, none is held.
        assert [(j.fits) for j in reply.jobs] == [True, True]
        check(queue)

    def test_when_a_head_does_not_fit_then_it_is_held_and_nothing_overtakes_it(self, queue: Queue) -> None:
        queue.add("small")
        queue.add("big", prompt_tokens=500)
        queue.add("next")

        reply = queue.worker("A").pull(kv_tokens=100)

        assert [(j.id.split(".")[2], j.fits) for j in reply.jobs] == [("small", True), ("big", False)]
        assert short(queue.worker("B").pull(kv_tokens=100).jobs) == ["next"]
        check(queue)

    def test_when_it_holds_one_already_then_it_takes_nothing(self, queue: Queue) -> None:
        queue.add("a")

        assert queue.worker("A").pull(holds_oversized=True).jobs == ()

    def test_when_a_job_exceeds_the_cache_then_others_may_take_it_and_its_lane_waits(self, queue: Queue) -> None:
        queue.add("huge", "one", prompt_tokens=5000)
        queue.add("behind", "one")
        queue.add("other", "two")

        small = queue.worker("A").pull(kv_tokens=1000, cache_tokens=1000)

        assert short(small.jobs) == ["other"]
        assert short(queue.worker("B").pull().jobs) == ["huge", "behind"]
        check(queue)

    def test_when_an_estimate_exceeds_the_job_limit_then_it_waits_and_is_not_rejected(self, queue: Queue) -> None:
        """An estimate may cause waiting, never rejection: translation counts exactly."""
        queue.configure(max_job_tokens=1000)
        job_id = queue.add("a", prompt_tokens=None, prompt_bytes=40_000)

        job = queue.worker("A").take(kv_tokens=900, cache_tokens=1000)

        assert (job.id, job.fits) == (job_id, False)

    @pytest.mark.parametrize("room", [{"kv_tokens": 0}, {"prefill_tokens": 0}, {"sequences": 0}])
    def test_when_there_is_no_room_then_nothing_is_taken_or_held(self, queue: Queue, room: dict[str, int]) -> None:
        queue.add("a")

        assert queue.worker("A").pull(**room).jobs == ()
        check(queue)

    def test_when_max_tokens_is_large_then_only_the_reserve_counts(self, queue: Queue) -> None:
        queue.add("a", max_tokens=100_000)

        assert queue.worker("A").take(kv_tokens=42, reserve_tokens=32).fits

    def test_when_tokens_were_published_then_they_count_as_prompt(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(tokens(job, 0, 15))
        worker.give_back(job)

        assert worker.pull(prefill_tokens=24, sequences=9).jobs[0].fits is False
        check(queue)

    def test_when_more_lanes_wait_than_a_pull_looks_at_then_it_says_so(self, queue: Queue) -> None:
        queue.submit(*[new_job("j", f"tenant{i:02}") for i in range(limits.MAX_LANES_PER_PULL + 4)])
        worker = queue.worker("A")

        first, second = worker.pull(), worker.pull()

        assert (len(first.jobs), first.has_more) == (limits.MAX_LANES_PER_PULL, True)
        assert (len(second.jobs), second.has_more) == (4, False)
        check(queue)


@pytest.mark.every_server
class TestGivenALostReply:
    def test_when_the_number_is_repeated_then_the_same_jobs_come(self, queue: Queue) -> None:
        queue.add("a")
        queue.add("b", prompt_tokens=500)
        worker = queue.worker("A")
        first = worker.pull(kv_tokens=100)
        queue.add("c")

        again = worker.pull(number=1, kv_tokens=100)

        assert again.jobs == first.jobs
        assert [e.kind for e in queue.events(first.jobs[0].id)] == ["submitted", "started"]
        check(queue)

    def test_when_some_have_ended_meanwhile_then_they_do_not_come_again(self, queue: Queue) -> None:
        queue.add("a")
        queue.add("b")
        worker = queue.worker("A")
        first, second = worker.pull().jobs
        worker.advance(ending(first, 0, 1))

        assert worker.pull(number=1).jobs == (second,)

    def test_when_a_late_double_of_an_older_pull_arrives_then_it_takes_nothing(self, queue: Queue) -> None:
        worker = queue.worker("A")
        queue.add("a")
        worker.pull()
        queue.add("b")
        worker.pull()
        queue.add("c")

        assert worker.pull(number=1).jobs == ()
        assert short(worker.pull().jobs) == ["c"]

    def test_when_redis_lost_the_pull_then_a_higher_number_is_a_new_pull(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")

        assert short(worker.pull(number=7).jobs) == ["a"]

    def test_when_another_incarnation_uses_the_number_then_it_is_its_own(self, queue: Queue) -> None:
        queue.add("a")
        queue.worker("A").pull()
        queue.add("b")

        assert short(queue.worker("B").pull(number=1).jobs) == ["b"]


class TestGivenTheBell:
    def test_when_a_submit_falls_between_pull_and_wait_then_the_wait_is_notified(self, queue: Queue) -> None:
        worker = queue.worker("A")
        last = worker.pull().last_notification
        queue.add("a")

        entries = queue.client.xread({queue.keys.notifications: last}, block=1)

        assert entries
        assert short(worker.pull().jobs) == ["a"]

    def test_when_nothing_became_ready_then_it_is_silent(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        last = worker.pull().last_notification

        worker.advance(tokens(job, 0, 1))
        worker.beat(job.id)
        queue.cancel(JobId("0.t.nobody"))

        assert not queue.client.xread({queue.keys.notifications: last})

    @pytest.mark.parametrize("how", ["give_back", "retry", "requeue", "resume", "not_before"])
    def test_when_something_becomes_ready_then_it_rings(self, queue: Queue, how: str) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        if how == "requeue":
            worker.advance(ending(job, 0, state=JobState.FAILED))
        if how == "not_before":
            queue.add("later", not_before_ms=queue.look().server_ms + 500)
        last = worker.pull().last_notification

        match how:
            case "give_back":
                worker.give_back(job)
            case "retry":
                worker.advance(ending(job, 0, state=JobState.FAILED, retry_in_ms=0))
            case "requeue":
                queue.requeue(job_id)
            case "resume":
                queue.resume()
            case _:
                queue.pass_time(600)
                worker.beat(job_id)

        assert queue.client.xread({queue.keys.notifications: last})

    def test_when_it_rings_often_then_it_stays_short(self, queue: Queue) -> None:
        for i in range(400):
            queue.add(f"j{i}")

        assert queue.client.xlen(queue.keys.notifications) < 200

    def test_when_a_timer_is_set_then_the_reply_says_when(self, queue: Queue) -> None:
        worker = queue.worker("A")
        assert worker.pull().due_ms is None
        due = queue.look().server_ms + 5000
        queue.add("later", not_before_ms=due)

        assert worker.pull().due_ms == due


class TestGivenAJobThatAnotherModelBegan:
    """Workers of one queue with two models, each of which continues its own jobs only."""

    OWN: ClassVar[dict[str, Any]] = {"own_model": "m1", "model_wait_ms": 1000}
    OTHER: ClassVar[dict[str, Any]] = {"own_model": "m2", "model_wait_ms": 1000}

    @pytest.fixture
    def job_id(self, queue: Queue) -> JobId:
        """It has tokens of m1, and was given back."""
        queue.add("a")
        worker = queue.worker("A")
        job = worker.take(**self.OWN)
        worker.advance(tokens(job, 0, 3, fingerprint="m1"))
        worker.give_back(job)
        return job.id

    def test_when_others_pull_for_long_then_it_waits_without_an_attempt(self, queue: Queue, job_id: JobId) -> None:
        queue.add("b")
        worker, events = queue.worker("B"), len(queue.events(job_id))

        assert short(worker.pull(**self.OTHER).jobs) == ["b"]
        for _ in range(20):
            queue.pass_time(1000)
            worker.beat(processed=0)
            assert worker.pull(**self.OTHER).jobs == ()

        assert (queue.view(job_id).attempt, len(queue.events(job_id))) == (1, events)
        check(queue)
        queue.pass_time(1000)
        owner = queue.worker("C")
        assert short(owner.pull(**self.OWN).jobs) == ["a"]
        assert queue.view(job_id).attempt == 2
        check(queue)

    def test_when_it_has_no_tokens_then_any_worker_takes_it(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")
        worker.give_back(worker.take(**self.OWN))

        assert short(queue.worker("B").pull(**self.OTHER).jobs) == ["a"]

    def test_when_its_worker_dies_then_a_worker_of_the_other_model_does_not_take_it(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")
        job = worker.take(**self.OWN)
        worker.advance(tokens(job, 0, 3, fingerprint="m1"))
        queue.pass_time(5000)

        assert queue.worker("B").pull(**self.OTHER).jobs == ()

        assert queue.state(job.id) is JobState.QUEUED
        check(queue)
        queue.pass_time(1000)
        assert short(queue.worker("C").pull(**self.OWN).jobs) == ["a"]

    def test_when_it_is_cancelled_while_it_is_set_aside_then_it_ends(self, queue: Queue, job_id: JobId) -> None:
        queue.worker("B").pull(**self.OTHER)

        queue.cancel(job_id)

        assert queue.state(job_id) is JobState.CANCELLED
        check(queue)


class TestGivenWhatIsNotOurs:
    def test_when_a_timer_ends_its_head_and_the_next_is_too_large_then_the_pull_ends(self, queue: Queue) -> None:
        queue.submit(new_job("late", ttl_ms=10), new_job("large", prompt_tokens=500))
        queue.pass_time(20)

        assert queue.worker("A").pull(kv_tokens=100, cache_tokens=100).jobs == ()

        assert short(queue.worker("B").pull().jobs) == ["large"]
        check(queue)

    def test_when_the_worker_may_not_read_lanes_then_no_job_loses_its_place(self, queue: Queue) -> None:
        queue.add("a")
        queue.add("b")
        queue.client.execute_command("ACL", "SETUSER", "blind", "on", "nopass", "~*", "&*", "+@all", "-xrange")
        pool = queue.client.connection_pool
        options: dict[str, Any] = {**pool.connection_kwargs, "username": "blind", "password": "any"}  # Any: of any type
        with redis.Redis(connection_pool=redis.ConnectionPool(pool.connection_class, **options)) as client:
            worker = Worker(Queue(client, queue.keys), "A")

            with pytest.raises(redis.ResponseError, match=r"(?i)permission|can't run"):
                worker.pull()

        assert queue.client.xlen(queue.keys.lane(0, "t")) == 2
        assert short(queue.worker("B").pull().jobs) == ["a", "b"]
        check(queue)

    def test_when_jobs_are_left_behind_those_taken_then_the_lane_keeps_these_alone(self, queue: Queue) -> None:
        names = [f"j{number}" for number in range(9)]
        for name in names:
            queue.add(name)
        lane = queue.keys.lane(0, "t")

        taken = short(queue.worker("A").pull(sequences=4).jobs)
        left = [fields[b"job"].decode() for _, fields in queue.entries(lane)]
        rest = short(queue.worker("B").pull().jobs)

        assert (taken, left, rest) == (names[:4], [f"0.t.{name}" for name in names[4:]], names[4:])
        assert queue.client.exists(lane) == 0
        check(queue)

    def test_when_a_lane_has_foreign_entries_then_the_pull_moves_them_to_garbage(self, queue: Queue) -> None:
        queue.add("a")
        lane = queue.keys.lane(0, "t")
        queue.client.xadd(lane, {"hello": "x" * 5000})
        queue.client.xadd(lane, {"job": "no id", "at": 1})
        queue.client.xadd(lane, {"job": "0.t.stranger", "at": 1})
        queue.add("b")

        assert short(queue.worker("A").pull().jobs) == ["a", "b"]

        garbage = queue.entries(queue.keys.key("garbage"))
        assert len(garbage) == 2
        assert all(len(f[b"what"]) <= limits.GARBAGE_ENTRY_BYTES for _, f in garbage)
        check(queue)

    def test_when_an_entry_is_not_the_one_its_job_names_then_it_is_dropped(self, queue: Queue) -> None:
        job_id = queue.add("a")
        lane = queue.keys.lane(0, "t")
        fields = {"job": job_id, "at": 1}
        queue.client.xadd(lane, fields)
        queue.client.xadd(lane, fields)

        assert short(queue.worker("A").pull().jobs) == ["a"]
        assert queue.worker("B").pull().jobs == ()
        check(queue)

    def test_when_a_stale_entry_precedes_the_valid_one_then_only_the_valid_one_counts(self, queue: Queue) -> None:
        job_id = queue.add("a")
        fields = {"job": job_id, "at": 1}
        queue.client.xadd(queue.keys.lane("returned", "t"), fields)
        for name in ("heads", "ready"):
            queue.client.zadd(queue.keys.key(name, "returned"), {"t": 1})

        assert short(queue.worker("A").pull().jobs) == ["a"]
        check(queue)

    def test_when_a_lane_is_a_string_then_the_others_are_served(self, queue: Queue) -> None:
        queue.add("a", "one")
        queue.add("b", "two")
        queue.client.set(queue.keys.lane(0, "one"), "foreign")

        assert short(queue.worker("A").pull().jobs) == ["b"]
        assert queue.client.get(queue.keys.lane(0, "one")) == b"foreign"

    def test_when_a_class_is_a_string_then_the_others_are_served(self, queue: Queue) -> None:
        queue.add("a", priority=5)
        queue.add("b", priority=3)
        queue.client.set(queue.keys.key("heads", 5), "foreign")

        assert short(queue.worker("A").pull().jobs) == ["b"]
        assert queue.client.get(queue.keys.key("heads", 5)) == b"foreign"

    def test_when_a_jobs_row_is_foreign_then_its_entry_goes_and_the_others_are_served(self, queue: Queue) -> None:
        bad = queue.add("bad")
        queue.add("good")
        queue.client.set(queue.keys.job(bad), "foreign")

        assert short(queue.worker("A").pull().jobs) == ["good"]
        assert len(queue.entries(queue.keys.key("garbage"))) == 1

    @pytest.mark.parametrize("is_foreign", [False, True])
    def test_when_a_prompt_is_gone_then_the_job_fails_with_that_reason(self, queue: Queue, is_foreign: bool) -> None:
        bad = queue.add("bad")
        queue.add("good")
        queue.client.delete(queue.keys.payload(bad))
        if is_foreign:
            queue.client.sadd(queue.keys.payload(bad), "foreign")

        assert short(queue.worker("A").pull().jobs) == ["good"]
        view = queue.view(bad)
        assert (view.state, view.error_code) == (JobState.FAILED, "payload_lost")
        check(queue)

    def test_when_a_foreign_timer_is_due_then_it_goes_to_the_garbage(self, queue: Queue) -> None:
        queue.client.zadd(queue.keys.key("timers"), {"nonsense": 1, "ttl|0.t.gone": 1, "what|0.t.a": 1})

        queue.worker("A").pull()

        assert queue.client.zcard(queue.keys.key("timers")) == 0
        assert len(queue.entries(queue.keys.key("garbage"))) == 2


class TestGivenAnIncarnationPastItsLifetime:
    def test_when_it_pulls_then_it_takes_nothing_until_it_beats(self, queue: Queue) -> None:
        worker = queue.worker("A")
        worker.beat()
        queue.add("a")
        queue.pass_time(4001)

        assert worker.pull().jobs == ()
        worker.beat()
        assert short(worker.pull().jobs) == ["a"]

    def test_when_it_never_beat_then_its_first_pull_begins_its_lifetime(self, queue: Queue) -> None:
        queue.add("a")

        queue.worker("A").take()

        assert list(queue.look().workers) == ["A"]


class TestGivenAJobThatIsHeldAlready:
    def test_when_it_returns_to_the_same_worker_then_the_epoch_differs(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")
        old = worker.take()
        worker.give_back(old)
        new = worker.take()

        assert (old.epoch, new.epoch) == (1, 2)
        assert worker.advance(tokens(new, 0, 1)) == [Ok()]
