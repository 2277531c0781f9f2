"""Decisions "Cancel, expire", "Timers", requeue, purge and delete, and looking without writing."""

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.calls import Accepted, Ok
from sluice.protocol.states import JobState
from sluice.protocol.wire import End, JobId
from tests.protocol.driving import Queue, check, drain, ending, new_job, short, tokens


def fail(queue: Queue, *names: str, num_tokens: int = 2) -> list[JobId]:
    """Jobs that failed after some tokens."""
    ids = [queue.add(name) for name in names]
    worker = queue.worker("failing")
    worker.number = queue.client.incr("pulls") * 10
    for job in worker.pull().jobs:
        worker.advance(ending(job, 0, num_tokens, state=JobState.FAILED))
    return ids


@pytest.mark.every_server
class TestGivenACancel:
    def test_when_the_job_waits_then_it_ends_at_once_with_no_worker_alive(self, queue: Queue) -> None:
        job_id = queue.add("a", idempotency_key="k", deadline_ms=9_999_999_999_999)
        queue.add("b")

        assert queue.cancel(job_id, reason="not needed") == ["cancelled"]

        assert queue.channel(job_id)[0][1].end == End(
            state=JobState.CANCELLED, error="not needed", error_code="cancelled"
        )
        assert queue.events(job_id)[-1].fields["state"] == b"cancelled"
        assert queue.names("timers") | queue.names("payload:t:a") == set()
        assert short(queue.worker("A").pull().jobs) == ["b"]
        check(queue)

    def test_when_it_is_repeated_or_late_or_unknown_then_the_reply_has_the_state(self, queue: Queue) -> None:
        first, second, third = queue.add("a"), queue.add("b"), queue.add("c")
        worker = queue.worker("A")
        jobs = worker.pull().jobs
        worker.advance(ending(jobs[0], 0, 1), ending(jobs[1], 0, state=JobState.FAILED))

        assert queue.cancel(first, second, third, third, JobId("0.t.nobody"), JobId("junk")) == [
            "done",
            "failed",
            "asked",
            "asked",
            "unknown",
            "unknown",
        ]
        check(queue)

    def test_when_the_job_was_given_back_then_it_ends_after_the_tokens_it_has(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(tokens(job, 0, 3))
        worker.give_back(job)

        assert queue.cancel(job_id) == ["cancelled"]
        assert [i for i, _ in queue.channel(job_id)] == ["3-0", "3-1"]
        check(queue)

    def test_when_the_job_is_not_due_then_it_ends_and_its_timer_goes(self, queue: Queue) -> None:
        job_id = queue.add("a", not_before_ms=9_999_999_999_999)

        assert queue.cancel(job_id) == ["cancelled"]
        assert queue.names("timers") | queue.names("delayed") == set()
        check(queue)

    def test_when_it_has_no_tokens_then_its_channel_goes_soon(self, queue: Queue) -> None:
        """Each channel takes 4 KB, and a purge may write a million of them."""
        first, second = queue.add("a"), queue.add("b")
        worker = queue.worker("A")
        jobs = worker.pull().jobs
        worker.advance(
            tokens(jobs[0], 0, 1),
            *[ending(job, i, state=JobState.CANCELLED) for job, i in zip(jobs, (1, 0), strict=True)],
        )

        assert queue.client.pttl(queue.keys.channel(first)) > limits.EMPTY_CHANNEL_TTL_S * 1000
        assert 0 < queue.client.pttl(queue.keys.channel(second)) <= limits.EMPTY_CHANNEL_TTL_S * 1000

    def test_when_a_flag_was_set_before_then_the_first_stands(self, queue: Queue) -> None:
        job_id = queue.add("a", deadline_ms=queue.look().server_ms + 100)
        worker = queue.worker("A")
        worker.take()
        queue.cancel(job_id)
        queue.pass_time(200)

        assert worker.beat(job_id).stops == ((job_id, JobState.CANCELLED),)

    def test_when_more_than_a_bite_is_asked_then_it_is_a_mistake(self, one_queue: Queue) -> None:
        with pytest.raises(ValueError, match="at most 32"):
            one_queue.cancel(*[JobId(f"0.t.j{i}") for i in range(33)])


@pytest.mark.every_server
class TestGivenTimers:
    def test_when_a_job_waits_longer_than_its_ttl_then_it_expires(self, queue: Queue) -> None:
        job_id = queue.add("a", ttl_ms=1000)
        queue.pass_time(999)
        assert queue.fire_timers() == 0
        queue.pass_time(1)

        assert queue.fire_timers() == 1

        view = queue.view(job_id)
        assert (view.state, view.error_code) == (JobState.EXPIRED, "ttl")
        check(queue)

    def test_when_it_was_started_in_time_then_its_ttl_is_over(self, queue: Queue) -> None:
        job_id = queue.add("a", ttl_ms=1000)
        worker = queue.worker("A")
        worker.give_back(worker.take())
        queue.pass_time(2000)
        queue.fire_timers()

        assert queue.state(job_id) is JobState.QUEUED
        check(queue)

    @pytest.mark.parametrize("is_running", [False, True])
    def test_when_the_deadline_passes_then_it_expires_at_once_or_is_flagged(
        self, queue: Queue, is_running: bool
    ) -> None:
        job_id = queue.add("a", deadline_ms=queue.look().server_ms + 1000)
        worker = queue.worker("A")
        job = worker.take() if is_running else None
        queue.pass_time(1001)

        reply = worker.beat(*([job_id] if job else []))

        if job is None:
            assert queue.state(job_id) is JobState.EXPIRED
        else:
            assert reply.stops == () or reply.stops == ((job_id, JobState.EXPIRED),)
            assert worker.beat(job_id).stops == ((job_id, JobState.EXPIRED),)
            assert worker.advance(ending(job, 0, 1, state=JobState.EXPIRED)) == [Ok(stop=JobState.EXPIRED)]
            assert queue.state(job_id) is JobState.EXPIRED
        check(queue)

    def test_when_expiry_and_pull_coincide_then_no_expired_job_is_started(self, queue: Queue) -> None:
        job_id = queue.add("a", ttl_ms=100)
        queue.pass_time(100)

        assert queue.worker("A").pull().jobs == ()
        assert queue.state(job_id) is JobState.EXPIRED
        check(queue)

    def test_when_many_are_due_then_a_call_fires_a_bite(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i}", ttl_ms=10) for i in range(40)])
        queue.pass_time(10)

        assert (queue.fire_timers(), queue.fire_timers(), queue.fire_timers()) == (limits.SLICE_JOBS, 8, 0)
        assert queue.look().totals["expired"] == 40
        check(queue)

    def test_when_a_job_becomes_due_then_it_is_ordered_by_that_time(self, queue: Queue) -> None:
        queue.configure(mode="fifo")
        now = queue.look().server_ms
        queue.add("delayed", "a", not_before_ms=now + 1000)
        queue.pass_time(500)
        queue.add("middle", "b")
        queue.pass_time(1000)
        queue.add("last", "c")

        assert short(queue.worker("A").pull().jobs) == ["middle", "delayed", "last"]
        check(queue)

    def test_when_a_job_ends_then_none_of_its_timers_is_left(self, queue: Queue) -> None:
        queue.add("a", ttl_ms=10_000, deadline_ms=9_999_999_999_999)
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, 1))

        assert queue.names("timers") == set()


class TestGivenTheDeadSet:
    def test_when_a_job_is_requeued_then_its_old_end_is_removed_and_it_resumes(self, queue: Queue) -> None:
        (job_id,) = fail(queue, "a")
        assert [i for i, _ in queue.channel(job_id)] == ["2-0", "2-1"]

        assert queue.requeue(job_id) == [True]

        assert [i for i, _ in queue.channel(job_id)] == ["2-0"]
        assert queue.state(job_id) is JobState.QUEUED
        assert queue.events(job_id)[-1].fields["why"] == b"requeue"
        check(queue)
        worker = queue.worker("B")
        job = worker.take()
        assert (job.published, job.epoch, job.attempt) == ((2,), 2, 2)
        worker.advance(ending(job, 2, 1))
        assert [i for i, _ in queue.channel(job_id)] == ["2-0", "3-0", "3-2"]
        assert queue.look().dead == 0
        check(queue)

    def test_when_it_fails_again_at_the_same_token_then_the_end_has_a_higher_id(self, queue: Queue) -> None:
        (job_id,) = fail(queue, "a")
        queue.requeue(job_id)
        worker = queue.worker("B")

        worker.advance(ending(worker.take(), 2, state=JobState.FAILED))

        assert [i for i, _ in queue.channel(job_id)] == ["2-0", "2-2"]
        queue.requeue(job_id)
        worker.advance(ending(worker.take(), 2, 1))
        assert [i for i, _ in queue.channel(job_id)] == ["2-0", "3-0", "3-3"]
        check(queue)

    def test_when_it_is_requeued_then_it_is_kept_until_it_ends_again(self, queue: Queue) -> None:
        (job_id,) = fail(queue, "a")
        assert queue.client.pttl(queue.keys.job(job_id)) > 0

        queue.requeue(job_id)

        for key in (queue.keys.job(job_id), queue.keys.payload(job_id), queue.keys.channel(job_id)):
            assert queue.client.pttl(key) == -1

    def test_when_a_choice_had_ended_well_then_it_is_not_generated_again(self, queue: Queue) -> None:
        job_id = queue.add("a", choices=2)
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(ending(job, 0, 4, choice=0), ending(job, 0, 1, choice=1, state=JobState.FAILED))
        assert queue.state(job_id) is JobState.FAILED

        queue.requeue(job_id)

        again = worker.take()
        assert (again.published, again.ended) == ((4, 1), (True, False))
        worker.advance(ending(again, 1, 2, choice=1))
        assert queue.state(job_id) is JobState.DONE
        assert [i for i, _ in queue.channel(job_id, 0)] == ["4-0", "4-1"]
        assert [i for i, _ in queue.channel(job_id, 1)] == ["1-0", "3-0", "3-2"]
        check(queue)

    def test_when_the_job_has_not_failed_or_its_prompt_is_gone_then_it_is_not_requeued(self, queue: Queue) -> None:
        failed, lost = fail(queue, "a", "b")
        waiting = queue.add("waiting")
        queue.client.delete(queue.keys.payload(lost))

        assert queue.requeue(waiting, JobId("0.t.nobody"), lost, failed, failed) == [False, False, False, True, False]
        check(queue)

    def test_when_the_deadline_has_passed_then_a_requeued_job_runs_nevertheless(self, queue: Queue) -> None:
        job_id = queue.add("a", deadline_ms=queue.look().server_ms + 1000, ttl_ms=500)
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, state=JobState.FAILED))
        queue.pass_time(2000)
        queue.requeue(job_id)
        worker.beat()

        assert worker.take().deadline_ms is None
        check(queue)

    def test_when_it_is_at_its_bound_then_the_oldest_leaves_and_will_be_forgotten(self, queue: Queue) -> None:
        queue.configure(dead_set_max=2, result_ttl_ms=1000)
        ids = [fail(queue, name)[0] for name in "abc"]

        assert queue.look().dead == 2
        assert queue.client.pttl(queue.keys.job(ids[0])) <= 1000
        assert queue.client.pttl(queue.keys.job(ids[1])) > 1000

    def test_when_a_job_is_rejected_then_it_takes_no_place_and_expires_like_a_done_one(self, queue: Queue) -> None:
        queue.configure(dead_set_max=1, result_ttl_ms=1000)
        [kept] = fail(queue, "a")
        job_id, worker = queue.add("wrong"), queue.worker("A")

        worker.advance(ending(worker.take(), 0, state=JobState.FAILED, error_code="unknown_token", is_rejected=True))

        assert queue.client.zrange(queue.keys.key("dead"), 0, -1) == [kept.encode()]
        assert (queue.view(job_id).state, queue.view(job_id).error_code) == (JobState.FAILED, "unknown_token")
        assert 0 < queue.client.pttl(queue.keys.job(job_id)) <= 1000
        assert queue.client.exists(queue.keys.payload(job_id)) == 0
        assert queue.requeue(job_id) == [False]
        check(queue)

    def test_when_its_time_is_over_then_its_members_go(self, queue: Queue) -> None:
        fail(queue, "a", "b")
        queue.pass_time(int(limits.DEAD_TTL_S * 1000) + 1000)

        queue.worker("B").pull()

        assert queue.look().dead == 0

    def test_when_a_requeued_job_has_a_key_then_it_lives_again(self, queue: Queue) -> None:
        job_id = queue.add("a", idempotency_key="k")
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, state=JobState.FAILED))

        queue.requeue(job_id)

        assert queue.client.pttl(queue.keys.key("idem", "t", "k")) == -1

    @pytest.mark.parametrize("mode", ["fifo", "fair"])
    def test_when_many_are_requeued_then_they_wait_in_their_class_from_then_on(self, queue: Queue, mode: str) -> None:
        queue.configure(mode=mode)
        old = [job_id for i in range(40) for job_id in fail(queue, f"dead{i:02}")]
        queue.pass_time(86_400_000)
        queue.submit(new_job("waits", "other"), new_job("urgent", "third", priority=9))
        queue.pass_time(1_200_000)

        for at in range(0, len(old), limits.SLICE_JOBS):
            queue.requeue(*old[at : at + limits.SLICE_JOBS])

        assert drain(queue, queue.worker("A")) == ["urgent", "waits", *(f"dead{i:02}" for i in range(40))]
        check(queue)

    def test_when_many_of_one_tenant_are_requeued_then_others_take_turns_with_them(self, queue: Queue) -> None:
        old = fail(queue, *(f"dead{i:02}" for i in range(20)))
        queue.requeue(*old)
        queue.submit(*[new_job(f"new{i:02}", "other") for i in range(20)])

        first = short(queue.worker("A").pull(sequences=20).jobs)

        assert 8 <= sum(name.startswith("new") for name in first) <= 12, first
        check(queue)

    def test_when_a_newer_job_has_its_key_then_only_the_newer_one_runs(self, queue: Queue) -> None:
        old = queue.add("old", idempotency_key="k", digest=b"request")
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, state=JobState.FAILED))
        key = queue.keys.key("idem", "t", "k")
        queue.client.delete(key)  # as its expiry does, long before the dead set forgets the job
        queue.add("new", idempotency_key="k", digest=b"request")
        mapped = queue.client.get(key)

        assert queue.requeue(old) == [False]

        assert queue.client.get(key) == mapped
        assert short(worker.pull().jobs) == ["new"]
        assert queue.state(old) is JobState.FAILED
        check(queue)


class TestGivenAPurge:
    def test_when_much_waits_then_it_goes_in_bites(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i}", f"tenant{i % 3}", priority=i % 4) for i in range(60)])
        queue.submit(*[new_job(f"d{i}", not_before_ms=9_999_999_999_999) for i in range(10)])
        worker = queue.worker("A")
        running = worker.pull(sequences=1).jobs[0]

        slices = [queue.run(calls.purge(queue.keys)) for _ in range(3)]

        assert slices == [(32, True), (32, True), (5, False)]
        assert queue.look().waiting_jobs == 0
        assert queue.state(running.id) is JobState.RUNNING
        check(queue)

    def test_when_a_tenant_is_named_then_only_its_jobs_go(self, queue: Queue) -> None:
        queue.submit(new_job("a", "one"), new_job("b", "one", priority=2), new_job("c", "two"))
        queue.submit(new_job("d", "one", not_before_ms=9_999_999_999_999))
        queue.submit(new_job("e", "one-more", not_before_ms=9_999_999_999_999))

        assert queue.run(calls.purge(queue.keys, tenant="one")) == (3, False)
        assert queue.look().waiting_jobs == 2
        check(queue)

    def test_when_foreign_entries_wait_then_they_go_too(self, queue: Queue) -> None:
        queue.client.xadd(queue.keys.lane(0, "t"), {"hello": "x"})
        queue.add("a")

        assert queue.run(calls.purge(queue.keys)) == (1, False)
        assert queue.names("lane:*") == set()
        check(queue)

    def test_when_suspects_wait_then_they_go_too(self, queue: Queue) -> None:
        queue.submit(new_job("a"), new_job("b"))
        for name in "AB":
            queue.worker(name).pull()
            queue.pass_time(5000)
        queue.worker("C").pull()

        assert queue.run(calls.purge(queue.keys)) == (2, False)
        assert queue.look().suspects == 0
        check(queue)


class TestGivenADelete:
    def test_when_jobs_have_ended_then_nothing_of_them_is_left(self, queue: Queue) -> None:
        job_id = queue.add("a", choices=2, idempotency_key="k")
        queue.cancel(job_id)
        (failed,) = fail(queue, "b")

        assert queue.run(calls.delete(queue.keys, [job_id, failed, JobId("0.t.nobody")])) == [True] * 3

        left = {name.split(":")[0] for name in queue.names()}
        assert left.isdisjoint({"job", "channel", "payload", "result", "idem", "dead"})

    def test_when_a_job_has_not_ended_then_it_stays(self, queue: Queue) -> None:
        waiting, running = queue.add("a"), queue.add("b", priority=5)
        queue.worker("A").pull(sequences=1)

        assert queue.run(calls.delete(queue.keys, [waiting, running])) == [False, False]
        check(queue)

    def test_when_the_key_names_another_job_by_now_then_it_stays(self, queue: Queue) -> None:
        job_id = queue.add("a", idempotency_key="k")
        queue.cancel(job_id)
        queue.client.set(queue.keys.key("idem", "t", "k"), "0.t.other queued digest")

        queue.run(calls.delete(queue.keys, [job_id]))

        assert queue.names("idem:t:k")


@pytest.mark.every_server
class TestGivenALook:
    def test_when_jobs_and_queue_are_looked_at_then_nothing_is_written(self, queue: Queue) -> None:
        ids = [queue.add("a"), queue.add("b", not_before_ms=9_999_999_999_999)]
        queue.worker("A").pull(sequences=1)

        def changes() -> int:
            return queue.client.info("persistence")["rdb_changes_since_last_save"]

        before = changes()
        queue.run(calls.status(queue.keys, [*ids, JobId("0.t.nobody"), JobId("junk")]))
        queue.look()
        queue.run(calls.inspect_batch(queue.keys, "b"))

        assert changes() == before

    def test_when_the_queue_is_looked_at_then_its_contents_are_returned(self, queue: Queue) -> None:
        queue.configure(max_job_tokens=500, features=("lora",))
        queue.submit(new_job("a", "one"), new_job("b", "two", priority=3), new_job("c", "two", priority=3))
        fail(queue, "x")
        queue.submit(new_job("d", "one"), new_job("e", "two", priority=3))

        view = queue.look()

        assert (view.waiting_jobs, view.waiting_tokens, view.running_jobs, view.dead) == (2, 60, 0, 4)
        assert view.lanes == (("3", "two", 1, 30), ("0", "one", 1, 30))
        assert view.totals["submitted"] == 6
        assert view.settings["max_job_tokens"] == "500"
        assert view.settings["features"] == "lora"
        assert view.oldest_ms is not None
        assert view.oldest_ms <= view.server_ms
        assert not view.is_paused

    def test_when_a_job_is_unknown_then_there_is_none(self, queue: Queue) -> None:
        assert queue.run(calls.status(queue.keys, [JobId("0.t.nobody")])) == [None]

    def test_when_a_running_job_was_asked_to_stop_then_it_shows(self, queue: Queue) -> None:
        job_id = queue.add("a")
        queue.worker("A").take()
        queue.cancel(job_id)

        view = queue.view(job_id)
        assert (view.asked, view.owner, view.attempt) == (JobState.CANCELLED, "A", 1)


class TestGivenAPause:
    def test_when_it_is_on_then_submit_cancel_advance_and_give_back_continue(self, queue: Queue) -> None:
        queue.submit(new_job("a"), new_job("b"))
        worker = queue.worker("A")
        first, second = worker.pull().jobs
        queue.pause()

        (answer,) = queue.submit(new_job("c"))
        assert isinstance(answer, Accepted)
        assert worker.advance(ending(first, 0, 1)) == [Ok()]
        assert worker.give_back(second) == [True]
        assert queue.cancel(second.id) == ["cancelled"]
        assert queue.look().is_paused
        check(queue)
