"""Submit: idempotent by id and by key, bounded, each job answered apart, nothing half written."""

import pytest
from redis.exceptions import ReadOnlyError

from sluice.protocol import calls
from sluice.protocol.calls import Accepted, Conflict, Duplicate, Refused
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, check, ending, new_job, short

NUM_BYTES = len(new_job("a").payload) + len(new_job("a").spec)


@pytest.mark.every_server
class TestGivenAnEmptyQueue:
    def test_when_jobs_are_submitted_then_each_reply_has_what_is_ahead_on_its_lane(self, queue: Queue) -> None:
        answers = queue.submit(new_job("a"), new_job("b"), new_job("c", "other"), new_job("d", priority=3))

        assert [(a.ahead_jobs, a.ahead_tokens) for a in answers if isinstance(a, Accepted)] == [
            (0, 0),
            (1, 30),
            (0, 0),
            (0, 0),
        ]
        check(queue)

    def test_when_the_prompt_is_text_then_tokens_are_estimated_by_bytes_per_token(self, queue: Queue) -> None:
        queue.configure(bytes_per_token=2.5)

        job_id = queue.add("a", prompt_tokens=None, prompt_bytes=101)

        assert queue.view(job_id).prompt_tokens == 41

    def test_when_max_tokens_is_large_then_the_cost_counts_the_reserve_for_each_choice(self, queue: Queue) -> None:
        queue.configure(reserve_tokens=50)

        job_id = queue.add("a", max_tokens=1000, choices=3)

        assert queue.view(job_id).cost == 10 + 3 * 50

    def test_when_a_job_id_belongs_to_another_partition_then_it_is_a_mistake(self, one_queue: Queue) -> None:
        with pytest.raises(ValueError, match="another partition"):
            one_queue.submit(new_job("a", id=JobId("1.t.a")))

    def test_when_a_priority_does_not_exist_then_it_is_a_mistake(self, one_queue: Queue) -> None:
        with pytest.raises(ValueError, match="priority"):
            one_queue.submit(new_job("a", priority=10))

    @pytest.mark.parametrize(("given_ms", "kept_ms"), [(-5000, -5000), (5000, 0)])
    def test_when_a_lost_job_comes_again_then_it_has_its_submit_time_but_none_to_come(
        self, queue: Queue, given_ms: int, kept_ms: int
    ) -> None:
        queue.stop_clock()

        job_id = queue.add("a", submitted_ms=queue.now_ms + given_ms)

        assert queue.view(job_id).submitted_ms == queue.now_ms + kept_ms
        (event,) = queue.events(job_id)
        assert (event.fields["submitted_ms"], event.at_ms) == (queue.now_ms + kept_ms, queue.now_ms)

    def test_when_it_is_not_due_then_it_has_no_entry_and_counts_as_waiting(self, queue: Queue) -> None:
        due = queue.look().server_ms + 1000
        job_id = queue.add("a", not_before_ms=due)
        queue.add("b", not_before_ms=1)

        assert queue.look().waiting_jobs == 2
        assert short(queue.worker("A").pull().jobs) == ["b"]
        check(queue)
        queue.pass_time(1000)
        assert queue.worker("B").take().id == job_id
        check(queue)


@pytest.mark.every_server
class TestGivenAJobThatWasSubmitted:
    def test_when_it_comes_again_then_it_is_the_same_job(self, queue: Queue) -> None:
        job_id = queue.add("a", idempotency_key="k")

        by_id = queue.submit(new_job("a", idempotency_key="k"))
        by_key = queue.submit(new_job("b", idempotency_key="k", digest=b"a"))

        assert by_id == by_key == [Duplicate(job_id, JobState.QUEUED)]
        assert queue.look().waiting_jobs == 1
        check(queue)

    def test_when_the_id_or_key_comes_with_another_job_then_it_is_a_conflict(self, queue: Queue) -> None:
        job_id = queue.add("a", idempotency_key="k")

        by_id = queue.submit(new_job("a", digest=b"other"))
        by_key = queue.submit(new_job("b", idempotency_key="k"))

        assert by_id == by_key == [Conflict(job_id)]
        check(queue)

    def test_when_it_comes_twice_in_one_call_then_the_second_is_the_duplicate(self, queue: Queue) -> None:
        answers = queue.submit(new_job("a"), new_job("a"), new_job("a", digest=b"other"))

        assert [type(answer) for answer in answers] == [Accepted, Duplicate, Conflict]
        check(queue)

    def test_when_it_runs_or_has_ended_then_the_answer_says_so(self, queue: Queue) -> None:
        job_id = queue.add("a", idempotency_key="k")
        worker = queue.worker("A")
        job = worker.take()
        assert queue.submit(new_job("a", idempotency_key="k")) == [Duplicate(job_id, JobState.RUNNING)]

        worker.advance(ending(job, 0, 1))

        assert queue.submit(new_job("a", idempotency_key="k")) == [Duplicate(job_id, JobState.DONE)]
        assert queue.submit(new_job("b", idempotency_key="k", digest=b"a")) == [Duplicate(job_id, JobState.DONE)]

    def test_when_the_job_is_forgotten_then_the_key_still_knows_it_for_the_stated_time(self, queue: Queue) -> None:
        queue.configure(result_ttl_ms=60_000, idempotency_ttl_ms=120_000)
        job_id = queue.add("a", idempotency_key="k")
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, 1))

        ttl = queue.client.pttl(queue.keys.key("idem", "t", "k"))
        assert 60_000 < ttl <= 120_000
        queue.client.delete(queue.keys.job(job_id))  # as its own expiry does
        assert queue.submit(new_job("b", idempotency_key="k", digest=b"a")) == [Duplicate(job_id, JobState.DONE)]

    def test_when_it_lives_then_the_key_does_not_expire(self, queue: Queue) -> None:
        queue.add("a", idempotency_key="k")

        assert queue.client.pttl(queue.keys.key("idem", "t", "k")) == -1

    def test_when_the_queue_is_full_then_a_duplicate_is_still_known(self, queue: Queue) -> None:
        queue.configure(max_waiting_jobs=1)
        queue.add("a")

        answers = queue.submit(new_job("b"), new_job("a"))

        assert [type(answer) for answer in answers] == [Refused, Duplicate]

    def test_when_the_digest_holds_any_bytes_then_it_is_compared_whole(self, queue: Queue) -> None:
        digest = bytes(range(256))
        queue.add("a", idempotency_key="k", digest=digest)

        assert isinstance(queue.submit(new_job("b", idempotency_key="k", digest=digest))[0], Duplicate)
        assert isinstance(queue.submit(new_job("b", idempotency_key="k", digest=digest[:-1]))[0], Conflict)


class TestGivenBounds:
    @pytest.mark.parametrize(
        ("setting", "bound", "reason"),
        [
            ("max_waiting_jobs", 2, "full_jobs"),
            ("max_waiting_tokens", 60, "full_tokens"),
            ("max_waiting_bytes", 2 * NUM_BYTES, "full_bytes"),
        ],
    )
    def test_when_they_are_reached_then_from_the_first_on_all_are_refused(
        self, queue: Queue, setting: str, bound: int, reason: str
    ) -> None:
        queue.configure(**{setting: bound})

        # The last one would fit by its tokens; order is kept.
        answers = queue.submit(*[new_job(name) for name in "abcd"], new_job("e", prompt_tokens=0, max_tokens=1))

        assert [type(a) for a in answers] == [Accepted, Accepted, Refused, Refused, Refused]
        refused = answers[2]
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.waiting_jobs, refused.waiting_tokens, refused.bound) == (reason, 2, 60, bound)
        assert queue.look().waiting_jobs == 2
        check(queue)

    def test_when_a_job_leaves_then_another_may_come(self, queue: Queue) -> None:
        queue.configure(max_waiting_jobs=1)
        queue.add("a")
        queue.worker("A").take()

        queue.add("b")

    def test_when_the_outbox_is_at_its_bound_then_submit_is_refused_and_nothing_else(self, queue: Queue) -> None:
        queue.configure(max_outbox_entries=1)
        job_id = queue.add("a")

        (refused,) = queue.submit(new_job("b"))

        assert isinstance(refused, Refused)
        assert refused.reason == "outbox_full"
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, 1))
        assert queue.state(job_id) is JobState.DONE
        assert len(queue.events(job_id)) == 3

    def test_when_the_outbox_has_too_many_bytes_then_submit_is_refused_and_nothing_else(self, queue: Queue) -> None:
        queue.configure(max_outbox_bytes=300_000, keep_prompts="full")
        answers = [
            answer
            for at in range(0, 256, 32)
            for answer in queue.submit(*[new_job(f"j{at + i}", payload=b"x" * 4096) for i in range(32)])
        ]

        assert [isinstance(answer, Accepted) for answer in answers] == [True] * 96 + [False] * 160
        refused = answers[-1]
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.bound) == ("outbox_full", 300_000)
        assert queue.client.xlen(queue.keys.outbox) == 3
        worker = queue.worker("A")
        worker.advance(*[ending(job, 0, 1) for job in worker.pull().jobs])
        queue.client.delete(queue.keys.outbox)
        assert isinstance(queue.submit(new_job("later"))[0], Accepted), "an empty outbox is not full"

    def test_when_callbacks_are_not_taken_then_the_bound_holds_and_names_what_must_run(self, queue: Queue) -> None:
        queue.configure(max_outbox_entries=3)
        queue.cancel(queue.add("a", wants_callback=True))
        queue.client.delete(queue.keys.outbox)
        queue.client.xadd(queue.keys.outbox, {"e": "1"})
        queue.add("b")

        (refused,) = queue.submit(new_job("c"))

        assert isinstance(refused, Refused)
        assert (refused.reason, refused.bound) == ("outbox_full", 3)
        assert "1 wait for `worker callbacks`" in refused.message
        assert queue.look().callback_entries == 1

    def test_when_a_job_exceeds_every_worker_then_it_alone_is_refused_with_both_numbers(self, queue: Queue) -> None:
        queue.configure(max_job_tokens=100)

        answers = queue.submit(new_job("a", prompt_tokens=81), new_job("b", prompt_tokens=80))

        refused, accepted = answers
        assert isinstance(refused, Refused)
        assert refused.reason == "too_large"
        assert "81" in refused.message
        assert "100" in refused.message
        assert isinstance(accepted, Accepted)

    def test_when_it_states_no_length_then_it_needs_room_for_its_prompt_and_one_token(self, queue: Queue) -> None:
        queue.configure(max_job_tokens=100)
        longest, longer = (new_job(f"{num}", prompt_tokens=num, is_length_stated=False) for num in (99, 100))

        accepted, refused = queue.submit(longest, longer)

        assert isinstance(accepted, Accepted)
        assert isinstance(refused, Refused)
        assert refused.message == "prompt is 100 tokens; a job here may have 100, its output included"

    def test_when_it_needs_what_no_worker_can_do_then_it_alone_is_refused(self, queue: Queue) -> None:
        queue.configure(features=("structured", "lora"))

        answers = queue.submit(
            new_job("a", features=("lora",)), new_job("b", features=("lora", "vision")), new_job("c", features=("str",))
        )

        assert [a.reason if isinstance(a, Refused) else "ok" for a in answers] == ["ok", "feature", "feature"]


class TestGivenKeysOfTheWrongType:
    @pytest.mark.parametrize("name", ["job:t:a", "lane:0:t", "heads:0", "ready:0", "batch:b", "idem:t:k"])
    def test_when_a_job_would_need_one_then_it_is_refused_and_the_key_is_left_alone(
        self, queue: Queue, name: str
    ) -> None:
        queue.client.rpush(queue.keys.key(*name.split(":")), "foreign")

        (refused,) = queue.submit(new_job("a", batch="b", idempotency_key="k"))

        assert isinstance(refused, Refused)
        assert refused.reason == "wrong_type"
        assert name.split(":")[-1] in refused.message
        assert queue.names() == {name, "config"}


class TestGivenABatch:
    def test_when_it_is_closed_and_all_have_ended_then_one_callback_says_so(self, queue: Queue) -> None:
        queue.submit(*[new_job(name, batch="b") for name in "abc"])
        worker = queue.worker("A")
        first, second, third = worker.pull().jobs
        worker.advance(ending(first, 0, 1), ending(second, 0, state=JobState.FAILED))

        view = queue.run(calls.close_batch(queue.keys, "b", callback_url="https://x/y"))
        assert (view.total, view.ended, view.is_closed, view.completed_ms) == (3, 2, True, None)
        (refused,) = queue.submit(new_job("d", batch="b"))
        assert isinstance(refused, Refused)
        assert refused.reason == "batch_closed"
        queue.cancel(third.id)
        worker.advance(ending(third, 0, state=JobState.CANCELLED))

        view = queue.run(calls.inspect_batch(queue.keys, "b"))
        assert (view.done, view.failed, view.cancelled, view.expired) == (1, 1, 1, 0)
        assert view.completed_ms is not None
        ((_, callback),) = queue.entries(queue.keys.callbacks)
        assert (callback[b"kind"], callback[b"id"], callback[b"url"]) == (b"batch", b"b", b"https://x/y")
        assert queue.client.pttl(queue.keys.key("batch", "b")) > 0

    def test_when_it_is_closed_after_all_have_ended_then_it_says_so_at_once(self, queue: Queue) -> None:
        queue.add("a", batch="b")
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, 1))
        assert queue.entries(queue.keys.callbacks) == []

        view = queue.run(calls.close_batch(queue.keys, "b", callback_url="https://x/y"))

        assert view.completed_ms is not None
        queue.run(calls.close_batch(queue.keys, "b"))
        assert len(queue.entries(queue.keys.callbacks)) == 1

    def test_when_a_failed_one_is_requeued_then_it_is_not_complete_until_that_ends(self, queue: Queue) -> None:
        job_id = queue.add("a", batch="b")
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, state=JobState.FAILED))
        queue.run(calls.close_batch(queue.keys, "b"))
        queue.requeue(job_id)
        assert queue.run(calls.inspect_batch(queue.keys, "b")).completed_ms is None

        worker.advance(ending(worker.take(), 0, 1))

        view = queue.run(calls.inspect_batch(queue.keys, "b"))
        assert (view.done, view.failed, view.completed_ms is not None) == (1, 0, True)

    def test_when_it_is_unknown_then_it_is_empty(self, queue: Queue) -> None:
        assert queue.run(calls.inspect_batch(queue.keys, "none")).total == 0


class TestGivenWhatTheHistoryKeeps:
    @pytest.mark.parametrize(("keep", "has_prompt"), [("none", False), ("hash", False), ("full", True)])
    def test_when_a_job_is_submitted_then_its_event_has_prompt_and_key_only_if_kept(
        self, queue: Queue, keep: str, has_prompt: bool
    ) -> None:
        queue.configure(keep_prompts=keep)
        job_id = queue.add("a", seed=2**64 - 1, idempotency_key="k")

        (event,) = queue.events(job_id)

        assert (event.kind, event.version) == ("submitted", 1)
        assert (event.fields.get("prompt") == new_job("a").payload) is has_prompt
        assert event.fields.get("key") == (b"k" if has_prompt else None)
        assert event.fields["seed"] == str(2**64 - 1).encode()
        assert event.fields["queue"] == b"q"
        assert event.fields["digest"] == b"a"

    def test_when_results_are_not_kept_then_the_event_has_none(self, queue: Queue) -> None:
        queue.configure(keep_results=False)
        job_id = queue.add("a")
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, 1))

        assert "result" not in queue.events(job_id)[-1].fields
        assert queue.view(job_id).has_result


class TestGivenTwoTenantsWithOneKey:
    def test_when_both_submit_then_each_has_a_job_of_its_own(self, queue: Queue) -> None:
        first, second = queue.submit(
            new_job("a", "acme", idempotency_key="k"), new_job("b", "zeta", idempotency_key="k")
        )
        (again,) = queue.submit(new_job("c", "zeta", idempotency_key="k", digest=b"b"))

        assert isinstance(first, Accepted)
        assert isinstance(second, Accepted)
        assert again == Duplicate(second.id, JobState.QUEUED)
        check(queue)


@pytest.mark.every_server
class TestGivenAServerThatIsAReplicaNow:
    def test_when_a_job_is_submitted_then_its_own_words_are_the_answer(self, queue: Queue) -> None:
        queue.client.replicaof("127.0.0.1", 1)
        try:
            with pytest.raises(ReadOnlyError, match="read only replica"):
                queue.submit(new_job("a"))
        finally:
            queue.client.replicaof("NO", "ONE")
        assert not queue.names("job:t:a")


@pytest.mark.every_server
class TestGivenAFullServer:
    def test_when_a_submit_is_refused_then_nothing_of_it_is_there(self, queue: Queue) -> None:
        queue.add("a")
        before = queue.names()
        queue.client.config_set("maxmemory", 1)

        refused, known = queue.submit(
            new_job("b", idempotency_key="k", batch="x", not_before_ms=9_999_999_999_999), new_job("a")
        )

        queue.client.config_set("maxmemory", 0)
        assert isinstance(refused, Refused)
        assert refused.reason == "full_memory"
        assert isinstance(known, Duplicate)
        assert queue.names() == before
        check(queue)
