"""Heartbeats, reclaim of a dead worker's jobs, give-back and deregistration: a job's way from owner to owner."""

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.calls import Ok, Replaced, SendFrom
from sluice.protocol.states import JobState
from tests.protocol.driving import Queue, check, ending, new_job, short, tokens
from tests.servers import RedisServer

EXPIRY_MS = 4000


@pytest.mark.every_server
class TestGivenAWorkerThatBeats:
    def test_when_it_holds_jobs_then_its_lifetime_is_renewed_and_they_stay_its_own(self, queue: Queue) -> None:
        queue.add("a")
        worker, other = queue.worker("A"), queue.worker("B")
        job = worker.take()
        for _ in range(3):
            queue.pass_time(3000)
            reply = worker.beat(job.id)
            assert (reply.was_dead, reply.stops, reply.lost) == (False, (), ())

        assert other.pull().jobs == ()
        check(queue)

    def test_when_a_pulls_reply_was_lost_then_its_jobs_are_given_back(self, queue: Queue) -> None:
        first, second = queue.add("a"), queue.add("b")
        worker = queue.worker("A")
        worker.pull(kv_tokens=30)
        worker.pull()

        worker.beat(first, processed=2)

        assert queue.state(first) is JobState.RUNNING
        assert queue.state(second) is JobState.QUEUED
        assert queue.events(second)[-1].fields["why"] == b"lost_reply"
        check(queue)

    def test_when_the_list_was_made_before_the_pull_was_processed_then_nothing_is_taken(self, queue: Queue) -> None:
        """The beat is late: its list does not know the jobs of pull 2, and says so by its number."""
        first, second = queue.add("a"), queue.add("b")
        worker = queue.worker("A")
        worker.pull(kv_tokens=30)
        worker.pull()

        worker.beat(first, processed=1)

        assert queue.state(second) is JobState.RUNNING
        check(queue)

    def test_when_many_were_never_received_then_each_beat_gives_back_a_slice(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i}") for i in range(40)])
        worker = queue.worker("A")
        worker.pull()
        worker.pull()

        worker.beat()
        assert queue.look().running_jobs == 8
        worker.beat()
        assert queue.look().running_jobs == 0
        check(queue)

    def test_when_a_job_is_flagged_then_the_reply_says_so(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        worker.take()
        queue.cancel(job_id)

        assert worker.beat(job_id).stops == ((job_id, JobState.CANCELLED),)

    def test_when_a_flagged_job_was_never_received_then_it_ends(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        worker.take()
        queue.cancel(job_id)

        worker.beat()

        assert queue.state(job_id) is JobState.CANCELLED
        check(queue)

    def test_when_its_own_end_crossed_the_beat_then_the_job_is_not_lost(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(ending(job, 0, 1))

        assert worker.beat(job.id).lost == ()

    def test_when_it_says_what_it_is_then_the_queue_shows_it(self, queue: Queue) -> None:
        about = {"host": "h1", "device": "cpu", "tokens_per_s": "12.5"}
        beat = calls.Beat(incarnation="A", held=(), processed_pull=0, expiry_ms=EXPIRY_MS, about=about)
        queue.run(calls.beat(queue.keys, beat))

        view = queue.look()
        assert about.items() <= view.workers["A"].items()
        assert view.tokens_per_s == 12.5


class TestGivenADeadWorker:
    def test_when_another_pulls_then_its_jobs_move_with_a_higher_epoch(self, queue: Queue) -> None:
        job_id = queue.add("a")
        dead, worker = queue.worker("A"), queue.worker("B")
        old = dead.take()
        dead.advance(tokens(old, 0, 3, first_scheduled_ms=7, first_token_ms=8, fingerprint="f"))
        beaten_ms = dead.beat(old.id).server_ms
        queue.pass_time(EXPIRY_MS + 1)

        job = worker.take()

        assert (job.id, job.epoch, job.attempt, job.published) == (job_id, 2, 2, (3,))
        assert (job.resumed_from, job.fingerprint) == ("A", "f")
        assert (job.first_scheduled_ms, job.first_token_ms) == (7, 8)
        assert [e.kind for e in queue.events(job_id)] == ["submitted", "started", "returned", "started"]
        assert queue.events(job_id)[2].fields["why"] == b"death"
        assert queue.events(job_id)[2].fields["seen_ms"] == beaten_ms
        assert list(queue.look().workers) == ["B"]
        assert dead.advance(tokens(old, 3, 1)) == [Replaced()]
        check(queue)

    def test_when_another_pulls_before_then_its_reply_has_the_time_of_expiry(self, queue: Queue) -> None:
        queue.add("a")
        dead, worker = queue.worker("A"), queue.worker("B")
        dead.beat(dead.take().id)
        over_ms = queue.now_ms + EXPIRY_MS
        queue.pass_time(1500)
        worker.beat()

        assert worker.pull().due_ms == over_ms
        queue.pass_time(EXPIRY_MS - 1500)
        reply = worker.pull()
        assert short(reply.jobs) == ["a"]
        assert reply.due_ms is None, "the reply does not name its own lifetime"

    def test_when_its_jobs_do_not_fit_then_the_other_does_not_ask_again_and_again(self, queue: Queue) -> None:
        queue.add("a")
        queue.worker("A").take()
        queue.pass_time(EXPIRY_MS + 1)

        reply = queue.worker("B").pull(kv_tokens=1, cache_tokens=1)

        assert (reply.jobs, reply.due_ms) == ((), reply.server_ms + limits.ASIDE_MS)

    def test_when_it_is_not_yet_past_its_lifetime_then_nothing_moves(self, queue: Queue) -> None:
        queue.add("a")
        queue.worker("A").take()
        queue.pass_time(EXPIRY_MS - 500)

        assert queue.worker("B").pull().jobs == ()

    def test_when_the_other_has_just_connected_then_it_does_not_reclaim(self, queue: Queue) -> None:
        queue.add("a")
        queue.worker("A").take()
        queue.pass_time(EXPIRY_MS + 1)

        assert queue.worker("B").pull(may_declare_dead=False).jobs == ()
        assert queue.worker("B").pull(number=2).jobs != ()

    def test_when_a_pull_was_sent_before_redis_stalled_then_it_does_not_reclaim(self, queue: Queue) -> None:
        """The stall outlasted a lifetime: the pull is served first, and the beats of the healthy lie behind it."""
        job_id = queue.add("a")
        healthy, worker = queue.worker("A"), queue.worker("B")
        healthy.take()
        until_ms = queue.now_ms + 1000
        queue.pass_time(EXPIRY_MS + 1)

        assert worker.pull(until_ms=until_ms).jobs == ()
        assert healthy.beat(job_id).lost == ()

        queue.pass_time(EXPIRY_MS + 1)
        worker.beat()
        assert worker.take(until_ms=queue.now_ms + 1000).id == job_id
        check(queue)

    def test_when_the_queue_is_paused_then_nothing_moves(self, queue: Queue) -> None:
        queue.add("a")
        queue.worker("A").take()
        queue.pass_time(EXPIRY_MS + 1)
        queue.pause()

        assert queue.worker("B").pull().jobs == ()

    def test_when_a_job_was_flagged_then_it_ends_instead(self, queue: Queue) -> None:
        job_id = queue.add("a")
        queue.worker("A").take()
        queue.cancel(job_id, reason="enough")
        queue.pass_time(EXPIRY_MS + 1)

        assert queue.worker("B").pull().jobs == ()
        view = queue.view(job_id)
        assert (view.state, view.error) == (JobState.CANCELLED, "enough")
        check(queue)

    def test_when_some_do_not_fit_then_they_wait_for_a_larger_worker(self, queue: Queue) -> None:
        queue.submit(new_job("a"), new_job("b", prompt_tokens=900))
        slow, worker = queue.worker("A"), queue.worker("B")
        first, second = slow.pull().jobs
        queue.pass_time(EXPIRY_MS + 1)

        moved = worker.pull(kv_tokens=100, cache_tokens=100).jobs

        assert [job.id for job in moved] == [first.id]
        reply = slow.beat(first.id, second.id)
        assert (reply.was_dead, reply.lost) == (True, (first.id, second.id))
        assert slow.advance(tokens(second, 0, 1)) == [Replaced()]
        queue.pass_time(limits.ASIDE_MS)
        slow.beat()
        assert short(slow.pull().jobs) == ["b"]
        check(queue)

    def test_when_one_does_not_fit_now_but_could_then_it_is_held_as_the_one(self, queue: Queue) -> None:
        queue.submit(new_job("a", prompt_tokens=900), new_job("b"))
        queue.worker("A").pull()
        queue.pass_time(EXPIRY_MS + 1)

        jobs = queue.worker("B").pull(kv_tokens=100).jobs

        assert [(job.resumed_from, job.fits) for job in jobs] == [("A", False)]
        check(queue)

    def test_when_it_held_more_than_a_bite_then_the_rest_moves_with_the_next_pull(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i}") for i in range(40)])
        dead, worker = queue.worker("A"), queue.worker("B")
        dead.pull()
        dead.pull()
        queue.pass_time(EXPIRY_MS + 1)

        first = worker.pull()
        worker.beat(*[job.id for job in first.jobs])
        assert len(first.jobs) == limits.SLICE_JOBS
        assert "A" in {name.removeprefix("held:") for name in queue.names("held:*")}
        assert len(worker.pull().jobs) == 8
        assert queue.names("held:A") == set()
        check(queue)

    def test_when_many_have_died_then_a_call_looks_at_four(self, queue: Queue) -> None:
        for i in range(6):
            queue.add(f"j{i}")
            queue.worker(f"dead{i}").take()
        queue.pass_time(EXPIRY_MS + 1)
        worker = queue.worker("B")

        replies = [worker.maintain() for _ in range(3)]
        found = [(reply.num_returned, reply.has_more) for reply in replies]
        assert found == [(limits.MAX_DEAD_PER_CALL, True), (2, False), (0, False)]
        assert len(worker.pull().jobs) == 6
        check(queue)

    def test_when_the_moving_pulls_reply_is_lost_then_the_repeat_brings_the_same(self, queue: Queue) -> None:
        queue.add("a")
        queue.worker("A").take()
        queue.pass_time(EXPIRY_MS + 1)
        worker = queue.worker("B")

        first = worker.pull()

        assert worker.pull(number=1).jobs == first.jobs
        check(queue)

    def test_when_a_jobs_row_is_foreign_then_its_lease_goes_and_its_mates_move(self, queue: Queue) -> None:
        bad, good = queue.add("bad"), queue.add("good")
        queue.worker("A").pull()
        queue.client.delete(queue.keys.job(bad))
        queue.client.set(queue.keys.job(bad), "foreign")
        queue.pass_time(EXPIRY_MS + 1)

        assert short(queue.worker("B").pull().jobs) == ["good"]
        assert queue.lease(bad) is None
        assert queue.names("held:A") == set()
        assert queue.state(good) is JobState.RUNNING
        assert queue.look().running_jobs == 1

    @pytest.mark.parametrize("num_jobs", [0, 1])
    def test_when_all_of_it_was_moved_then_it_takes_nothing_until_it_beats(self, queue: Queue, num_jobs: int) -> None:
        """Its loop hangs, its exchange still pulls: beat, lifetime over, moved, pull, submit, pull, beat, pull."""
        silent, worker = queue.worker("A"), queue.worker("B")
        silent.beat()
        for i in range(num_jobs):
            queue.add(f"j{i}")
            silent.take()
        queue.pass_time(EXPIRY_MS + 1)
        assert len(worker.pull().jobs) == num_jobs
        assert "A" not in queue.look().workers
        new = queue.add("new")

        assert silent.pull().jobs == ()

        silent.beat()
        assert silent.take().id == new
        check(queue)

    def test_when_its_list_of_jobs_is_a_foreign_key_then_the_other_dead_are_reclaimed(self, queue: Queue) -> None:
        queue.add("a")
        queue.worker("A").take()
        queue.add("b")
        queue.worker("B").take()
        queue.client.delete(queue.keys.key("held", "A"))
        queue.client.set(queue.keys.key("held", "A"), "foreign")
        queue.pass_time(EXPIRY_MS + 1)

        assert short(queue.worker("C").pull().jobs) == ["b"]

    def test_when_what_it_said_was_forgotten_then_nothing_of_it_stays_for_ever(self, queue: Queue) -> None:
        queue.add("a")
        queue.worker("A").take()
        queue.client.delete(queue.keys.key("worker", "A"))
        queue.pass_time(EXPIRY_MS + 1)

        queue.worker("B").pull()

        assert queue.client.pttl(queue.keys.key("worker", "A")) > 0

    def test_when_it_died_with_its_channel_half_written_then_the_next_goes_on_there(self, queue: Queue) -> None:
        job_id = queue.add("a")
        dead, worker = queue.worker("A"), queue.worker("B")
        dead.advance(tokens(dead.take(), 0, 4))
        queue.pass_time(EXPIRY_MS + 1)
        job = worker.take()

        assert worker.advance(ending(job, 4, 2)) == [Ok()]
        assert [i for i, _ in queue.channel(job_id)] == ["4-0", "6-0", "6-1"]
        check(queue)


@pytest.mark.every_server
class TestGivenADeregistration:
    def test_when_all_is_handed_back_then_the_incarnation_is_gone_and_jobs_move(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(tokens(job, 0, 2))

        assert worker.give_back(job, deregister=True) == [True]

        assert queue.look().workers == {}
        assert queue.names("alive") == set()
        assert queue.hash_of("worker", "A") == {"farewell": "1"}
        assert queue.client.pttl(queue.keys.key("worker", "A")) > 0
        again = queue.worker("B").take()
        assert (again.id, again.published, again.resumed_from) == (job_id, (2,), "A")
        check(queue)

    def test_when_something_is_left_then_others_take_it_at_once_and_no_death_is_listed(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")
        worker.beat()
        job = worker.take()

        worker.give_back(deregister=True)

        assert queue.worker("B").take().resumed_from == "A"
        assert "deaths" not in queue.fields("t", job.id.split(".")[2])
        assert queue.events(job.id)[2].fields["why"] == b"farewell"
        check(queue)

    def test_when_a_beat_was_under_way_then_it_does_not_bring_the_incarnation_back(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        worker.take()
        worker.give_back(deregister=True)

        reply = worker.beat(job_id)

        assert (reply.was_dead, reply.lost) == (True, (job_id,))
        assert queue.worker("B").take().id == job_id
        check(queue)

    def test_when_a_pull_or_beat_comes_late_then_it_takes_nothing_for_a_gone_process(self, queue: Queue) -> None:
        """A call that waited somewhere on its way, while the worker repeated it, drained and ended."""
        job_id = queue.add("a")
        worker = queue.worker("A")
        worker.beat()
        worker.give_back(deregister=True)

        assert worker.pull().jobs == ()
        assert worker.beat().was_dead
        assert worker.pull().jobs == ()

        assert queue.look().workers == {}
        assert queue.worker("B").take().id == job_id
        check(queue)

    def test_when_the_returned_lane_is_a_foreign_key_then_the_job_waits_for_it_to_go(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        queue.client.set(queue.keys.lane("returned", "t"), "foreign")

        assert worker.give_back(job) == [True]

        assert queue.state(job_id) is JobState.QUEUED
        queue.pass_time(10_000)
        worker.beat()
        assert worker.pull().jobs == ()
        queue.client.delete(queue.keys.lane("returned", "t"))
        queue.pass_time(10_000)
        worker.beat()
        assert worker.take().id == job_id
        check(queue)

    def test_when_a_job_is_another_owners_by_now_then_it_is_not_given_back(self, queue: Queue) -> None:
        queue.add("a")
        slow, worker = queue.worker("A"), queue.worker("B")
        old = slow.take()
        queue.pass_time(EXPIRY_MS + 1)
        worker.take()

        assert slow.give_back(old, deregister=True) == [False]
        assert queue.state(old.id) is JobState.RUNNING
        check(queue)

    def test_when_the_same_is_given_back_twice_then_the_second_does_nothing(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")
        job = worker.take()

        assert (worker.give_back(job), worker.give_back(job)) == ([True], [False])
        assert queue.look().waiting_jobs == 1
        check(queue)

    def test_when_a_flagged_job_is_given_back_then_it_ends(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        queue.cancel(job_id)

        assert worker.give_back(job) == [True]
        assert queue.state(job_id) is JobState.CANCELLED
        check(queue)


class TestGivenARedisThatWasAway:
    @pytest.mark.slow
    def test_when_it_is_back_then_no_lease_moves_until_every_worker_could_beat(
        self, durable_valkey: RedisServer
    ) -> None:
        """The real uptime of a real server: the queue's clock is the server's own here."""
        with durable_valkey.client() as client:
            queue = Queue(client)
            job_id = queue.add("a")
            queue.worker("A").beat(expiry_ms=10_000)
            queue.worker("A").take()
            client.zadd(queue.keys.key("alive"), {"A": 1})  # its next heartbeat was due as Redis went away
        durable_valkey.restart()
        with durable_valkey.client() as client:
            queue = Queue(client)
            worker = queue.worker("B")
            worker.beat()

            assert worker.pull().jobs == ()
            # Its clock an hour on, the server has been up for long enough.
            queue.stop_clock()
            queue.worker("B").beat()
            assert worker.take().id == job_id
            check(queue)

    @pytest.mark.slow
    def test_when_it_lost_the_last_second_then_the_worker_resends_from_the_channel_end(
        self, durable_valkey: RedisServer
    ) -> None:
        with durable_valkey.client() as client:
            queue = Queue(client)
            queue.add("a")
            worker = queue.worker("A")
            job = worker.take()
            worker.advance(tokens(job, 0, 3))
            saved = queue.client.dump(queue.keys.key("held", "A"))
            channel = queue.client.dump(queue.keys.channel(job.id))
            worker.advance(tokens(job, 3, 2))
            # What an append-only file written each second may come back as: both keys as they were.
            queue.client.restore(queue.keys.key("held", "A"), 0, saved, replace=True)
            queue.client.restore(queue.keys.channel(job.id), 0, channel, replace=True)
            # The server may write its file late, while an fsync goes on.
            assert queue.client.waitaof(1, 0, 10_000)[0] == 1
        durable_valkey.restart(crash=True)
        with durable_valkey.client() as client:
            queue = Queue(client)
            worker = queue.worker("A")

            assert worker.advance(tokens(job, 5, 1)) == [SendFrom(3)]
            assert worker.advance(tokens(job, 3, 3)) == [Ok()]
            check(queue)
