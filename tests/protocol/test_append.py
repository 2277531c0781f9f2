"""Decision "Append": compare-and-append, fenced by (incarnation, epoch), tokens and end in one call."""

from typing import Any

import pytest
import redis

from sluice.protocol import calls, limits
from sluice.protocol.calls import Already, Broken, Ok, Replaced, Retried, SendFrom
from sluice.protocol.states import JobState
from sluice.protocol.wire import End, JobId, JobOptions, JobSpec, encode_spec
from tests.protocol.driving import Queue, check, ending, new_job, packed, tokens


@pytest.mark.every_server
class TestGivenALeasedJob:
    def test_when_tokens_are_sent_then_the_entry_id_is_the_offset_after_them(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()

        answers = worker.advance(tokens(job, 0, 3), tokens(job, 3, 1))

        assert answers == [Ok(), Ok()]
        assert [(i, e.token_ids) for i, e in queue.channel(job_id)] == [("3-0", (0, 1, 2)), ("4-0", (3,))]
        assert queue.view(job_id).published == (4,)
        check(queue)

    @pytest.mark.parametrize(("start", "num_tokens"), [(0, 5), (2, 3), (1, 2), (0, 0)])
    def test_when_all_of_it_is_there_then_it_is_already(self, queue: Queue, start: int, num_tokens: int) -> None:
        queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(tokens(job, 0, 5))

        assert worker.advance(tokens(job, start, num_tokens)) == [Already()]
        check(queue)

    @pytest.mark.parametrize(("start", "num_tokens"), [(7, 1), (6, 0), (3, 5)])
    def test_when_it_does_not_follow_then_the_worker_sends_from_the_offset(
        self, queue: Queue, start: int, num_tokens: int
    ) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(tokens(job, 0, 5))

        assert worker.advance(tokens(job, start, num_tokens)) == [SendFrom(5)]
        assert len(queue.channel(job_id)) == 1

    def test_when_an_end_comes_with_published_tokens_then_it_is_resent_from_the_offset(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(tokens(job, 0, 5))

        assert worker.advance(ending(job, 3, 2)) == [SendFrom(5)]
        assert queue.state(job_id) is JobState.RUNNING
        assert worker.advance(ending(job, 5)) == [Ok()]
        check(queue)

    def test_when_times_and_fingerprint_come_twice_then_the_first_stand(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()

        first: dict[str, Any] = {"first_scheduled_ms": 5, "first_token_ms": 6, "prompt_tokens": 12, "fingerprint": "f1"}
        second: dict[str, Any] = {
            "first_scheduled_ms": 7,
            "first_token_ms": 8,
            "prompt_tokens": 12,
            "fingerprint": "f2",
        }
        worker.advance(tokens(job, 0, 1, **first), tokens(job, 1, 1, **second))

        view = queue.view(job_id)
        assert (view.first_scheduled_ms, view.first_token_ms, view.prompt_tokens) == (5, 6, 12)
        worker.give_back(job)
        assert worker.take().fingerprint == "f1"

    def test_when_an_attempt_had_no_tokens_then_model_and_options_are_those_of_the_next(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")
        first = worker.take()
        worker.advance(tokens(first, 0, 0, fingerprint="f1", resolved=b"r1"))
        worker.give_back(first)

        second = worker.take()
        worker.advance(tokens(second, 0, 3, fingerprint="f2", resolved=b"r2"))
        worker.give_back(second)

        job = worker.take()
        assert (job.fingerprint, job.resolved) == ("f2", b"r2")

    def test_when_nothing_is_sent_then_nothing_is_answered(self, queue: Queue) -> None:
        assert queue.worker("A").advance() == []


@pytest.mark.every_server
class TestGivenAnEnd:
    def test_when_it_comes_with_the_last_tokens_then_all_that_ending_means_is_done(self, queue: Queue) -> None:
        job_id = queue.add("a", idempotency_key="k", wants_callback=True, deadline_ms=9_999_999_999_999)
        worker = queue.worker("A")
        job = worker.take()

        assert worker.advance(tokens(job, 0, 2), ending(job, 2, 1)) == [Ok(), Ok()]

        assert [i for i, _ in queue.channel(job_id)] == ["2-0", "3-0", "3-1"]
        assert queue.channel(job_id)[-1][1].end == End(state=JobState.DONE, finish_reason="stop")
        assert queue.client.get(queue.keys.result(job_id)) == b"the result"
        view = queue.view(job_id)
        assert (view.state, view.finish_reason, view.output_tokens) == (JobState.DONE, "stop", 3)
        assert queue.names("held:*") | queue.names("timers") | queue.names("payload:*") == set()
        assert [f[b"id"] for _, f in queue.entries(queue.keys.callbacks)] == [job_id.encode()]
        *_, ended = queue.events(job_id)
        assert (ended.kind, ended.version) == ("ended", 3)
        assert ended.fields["state"] == b"done"
        assert ended.fields["incarnation"] == b"A"
        assert ended.fields["result"] == b"the result"
        assert queue.client.pttl(queue.keys.channel(job_id)) == pytest.approx(limits.CHANNEL_TTL_S * 1000, abs=5000)
        for key in (queue.keys.job(job_id), queue.keys.result(job_id)):
            assert queue.client.pttl(key) == pytest.approx(limits.RESULT_TTL_S * 1000, abs=5000)
        check(queue)

    def test_when_its_reply_was_lost_and_it_is_sent_again_then_it_is_already(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(ending(job, 0, 3))

        assert worker.advance(ending(job, 0, 3)) == [Already()]
        assert [e.kind for e in queue.events(job_id)] == ["submitted", "started", "ended"]
        check(queue)

    def test_when_another_incarnation_or_epoch_ended_it_then_it_is_replaced(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        worker.give_back(job)
        again = worker.take()
        worker.advance(ending(again, 0, 3))

        assert worker.advance(ending(job, 0, 3)) == [Replaced()]
        assert queue.worker("B").advance(ending(again, 0, 3)) == [Replaced()]

    def test_when_tokens_come_with_an_end_then_they_are_written_apart(self, queue: Queue) -> None:
        """So that a requeue can take back the end without its tokens."""
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        end = End(state=JobState.DONE, finish_reason="length")

        worker.advance(ending(job, 0, 2, entry=packed(2, 0, end)))

        entries = queue.channel(job_id)
        assert [(i, e.start, e.token_ids, e.text, e.end) for i, e in entries] == [
            ("2-0", 0, (0, 1), "xx", None),
            ("2-1", 2, (), "", end),
        ]

    def test_when_the_job_is_unknown_or_its_id_is_none_then_it_is_replaced(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        strangers = [tokens(job, 0, 1, job_id=JobId(name)) for name in ("0.t.stranger", "nonsense", "0.T.x", "")]

        assert worker.advance(*strangers) == [Replaced()] * 4

    @pytest.mark.parametrize(("keeps_results", "stated"), [(True, 9), (False, None)])
    def test_when_a_large_result_was_put_in_parts_then_the_end_names_its_length(
        self, queue: Queue, keeps_results: bool, stated: int | None
    ) -> None:
        """Its event does only if the history keeps results: the recorder reads what it names."""
        queue.configure(keep_results=keeps_results)
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()

        def put(offset: int, part: bytes) -> str:
            return queue.run(calls.put_result(queue.keys, "A", job_id, job.epoch, offset=offset, part=part))

        assert (put(0, b"abc"), put(3, b"defg")) == ("ok", "ok")
        assert worker.advance(ending(job, 0, 1, result=None, result_bytes=9)) == [SendFrom(0)]
        assert put(7, b"hi") == "ok"
        assert worker.advance(ending(job, 0, 1, result=None, result_bytes=9)) == [Ok()]

        assert queue.client.get(queue.keys.result(job_id)) == b"abcdefghi"
        assert queue.events(job_id)[-1].fields.get("result_bytes") == stated
        assert put(0, b"late") == "replaced"

    @pytest.mark.parametrize("kept", [b"", b"an old result of another attempt"])
    def test_when_a_part_of_a_result_is_missing_then_the_end_waits_for_all_of_them(
        self, queue: Queue, kept: bytes
    ) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        if kept:
            queue.client.set(queue.keys.result(job_id), kept)

        def put(offset: int, part: bytes) -> str:
            return queue.run(calls.put_result(queue.keys, "A", job_id, job.epoch, offset=offset, part=part))

        # The server refused the part before.
        assert (put(3, b"defg"), put(7, b"hi")) == ("missing", "missing")
        assert worker.advance(ending(job, 0, 1, result=None, result_bytes=9)) == [SendFrom(0)]
        assert [put(0, b"abc"), put(3, b"defg"), put(3, b"defg"), put(7, b"hi")] == ["ok", "ok", "missing", "ok"]

        assert worker.advance(ending(job, 0, 1, result=None, result_bytes=9)) == [Ok()]
        assert queue.client.get(queue.keys.result(job_id)) == b"abcdefghi"

    def test_when_a_part_exceeds_the_bound_then_it_is_refused(self, queue: Queue) -> None:
        job_id = queue.add("a")
        job = queue.worker("A").take()

        call = calls.put_result(queue.keys, "A", job_id, job.epoch, offset=limits.MAX_RESULT_BYTES, part=b"x")

        assert queue.run(call) == "too_large"

    def test_when_parts_were_put_and_the_job_is_cancelled_then_they_are_no_result(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        queue.run(calls.put_result(queue.keys, "A", job_id, job.epoch, offset=0, part=b"abc"))

        worker.advance(ending(job, 0, state=JobState.CANCELLED))

        assert not queue.view(job_id).has_result


class TestGivenAFlaggedJob:
    def test_when_it_advances_then_the_reply_says_stop_and_its_tokens_are_kept(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        assert queue.cancel(job_id) == ["asked"]

        assert worker.advance(tokens(job, 0, 2)) == [Ok(stop=JobState.CANCELLED)]
        assert worker.advance(tokens(job, 0, 2)) == [Already(stop=JobState.CANCELLED)]
        assert worker.advance(ending(job, 2, state=JobState.CANCELLED)) == [Ok(stop=JobState.CANCELLED)]
        assert queue.state(job_id) is JobState.CANCELLED
        check(queue)

    def test_when_its_own_end_was_under_way_then_that_end_stands(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        queue.cancel(job_id)

        worker.advance(ending(job, 0, 4))

        assert queue.state(job_id) is JobState.DONE
        assert worker.advance(ending(job, 4, state=JobState.CANCELLED)) == [Already()]
        assert queue.state(job_id) is JobState.DONE
        check(queue)


class TestGivenAChannelAheadOfItsLease:
    """A call failed after it had appended, and before it wrote the lease."""

    def test_when_the_worker_sends_the_tokens_again_then_it_goes_on_after_them(self, queue: Queue) -> None:
        queue.add("one")
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(tokens(job, 0, 2))
        queue.client.xadd(queue.keys.channel(job.id), {"e": packed(2, 3)}, id="5-0")

        assert worker.advance(tokens(job, 2, 3)) == [calls.SendFrom(5)]

        assert worker.advance(ending(job, 5, 1)) == [calls.Ok(None)]
        check(queue)


class TestGivenAZombie:
    """Its job was given to another incarnation."""

    def test_when_it_writes_then_all_of_it_is_refused(self, queue: Queue) -> None:
        job_id = queue.add("a")
        zombie, worker = queue.worker("A"), queue.worker("B")
        old = zombie.take()
        zombie.advance(tokens(old, 0, 2))
        queue.pass_time(5000)
        new = worker.take()

        assert zombie.advance(tokens(old, 2, 1), ending(old, 2, 1)) == [Replaced(), Replaced()]
        assert zombie.advance(tokens(old, 2, 1, epoch=new.epoch)) == [Replaced()]
        assert queue.run(calls.put_result(queue.keys, "A", job_id, old.epoch, offset=0, part=b"x")) == "replaced"
        assert worker.advance(tokens(new, 2, 1)) == [Ok()]
        check(queue)

    def test_when_the_job_returned_to_its_incarnation_then_its_old_sequence_is_fenced(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        old = worker.take()
        worker.give_back(old)
        new = worker.take()

        assert worker.advance(tokens(old, 0, 1), ending(old, 0, 1)) == [Replaced(), Replaced()]
        assert queue.run(calls.put_result(queue.keys, "A", job_id, old.epoch, offset=0, part=b"x")) == "replaced"
        assert worker.advance(tokens(new, 0, 1)) == [Ok()]
        check(queue)

    def test_when_its_job_was_given_back_then_it_may_not_write(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        worker.give_back(job)

        assert worker.advance(tokens(job, 0, 1)) == [Replaced()]
        assert queue.channel(job_id) == []

    def test_when_the_channel_has_expired_after_the_end_then_it_does_not_come_back(self, queue: Queue) -> None:
        job_id = queue.add("a")
        zombie, worker = queue.worker("A"), queue.worker("B")
        old = zombie.take()
        zombie.give_back(old)
        worker.advance(ending(worker.take(), 0, 1))
        queue.client.delete(queue.keys.channel(job_id))

        zombie.advance(tokens(old, 0, 1), ending(old, 0, 1))

        assert queue.names("channel:*") == set()


class TestGivenSeveralChoices:
    def test_when_all_have_ended_then_the_job_has(self, queue: Queue) -> None:
        job_id = queue.add("a", choices=3)
        worker = queue.worker("A")
        job = worker.take()

        worker.advance(tokens(job, 0, 2, choice=2), ending(job, 0, 1, choice=0, result=None))
        assert queue.state(job_id) is JobState.RUNNING
        worker.advance(ending(job, 0, choice=1, result=None), ending(job, 2, 1, choice=2))

        assert queue.state(job_id) is JobState.DONE
        assert queue.view(job_id).published == (1, 0, 3)
        assert [len(queue.channel(job_id, c)) for c in range(3)] == [2, 1, 3]
        check(queue)

    def test_when_one_has_ended_and_the_worker_goes_then_the_next_one_gets_it(self, queue: Queue) -> None:
        queue.add("a", choices=2)
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(ending(job, 0, 1, choice=0), tokens(job, 0, 4, choice=1))
        worker.give_back(job)

        again = worker.take()

        assert (again.published, again.ended) == ((1, 4), (True, False))
        assert worker.advance(ending(again, 1, choice=0)) == [Already()]

    def test_when_a_choice_does_not_exist_then_it_is_replaced(self, queue: Queue) -> None:
        queue.add("a", choices=2)
        worker = queue.worker("A")
        job = worker.take()

        assert worker.advance(tokens(job, 0, 1, choice=2)) == [Replaced()]

    def test_when_it_is_cancelled_before_it_starts_then_its_first_choice_gets_the_end(self, queue: Queue) -> None:
        job_id = queue.add("a", choices=2)

        queue.cancel(job_id, reason="enough")

        [(entry_id, entry)] = queue.channel(job_id, 0)
        assert entry_id == "0-1"
        assert entry.end == End(state=JobState.CANCELLED, error="enough", error_code="cancelled")
        assert queue.channel(job_id, 1) == []


class TestGivenARetryableFailure:
    def test_when_it_may_be_retried_then_it_waits_its_time_and_goes_on_at_its_next_token(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()

        failure = ending(job, 0, 2, state=JobState.FAILED, retry_in_ms=1000)
        assert worker.advance(failure) == [Retried()]

        view = queue.view(job_id)
        assert (view.state, view.failures, view.error, view.error_code) == (JobState.QUEUED, 1, "it broke", "broke")
        assert worker.advance(failure) == [Replaced()], "its lease is over, from any sender"
        assert worker.pull().jobs == ()
        check(queue)
        queue.pass_time(1000)
        again = worker.take()
        assert (again.published, again.attempt, again.epoch, again.failures) == ((2,), 2, 2, 1)
        submitted, started, returned, again_started = queue.events(job_id)
        kinds = [event.kind for event in (submitted, started, returned, again_started)]
        assert kinds == ["submitted", "started", "returned", "started"]
        assert (returned.fields["why"], returned.fields["error"]) == (b"retry", b"it broke")
        assert returned.fields["error_code"] == b"broke"
        check(queue)

    def test_when_it_was_asked_to_end_meanwhile_then_it_ends_as_asked(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        queue.cancel(job_id, reason="enough")

        worker.advance(ending(job, 0, 1, state=JobState.FAILED, retry_in_ms=0))

        view = queue.view(job_id)
        assert (view.state, view.error, view.error_code) == (JobState.CANCELLED, "enough", "cancelled")
        end = queue.channel(job_id)[-1][1].end
        assert end is not None
        assert (end.state, end.error, end.error_code) == (JobState.CANCELLED, "enough", "cancelled")
        check(queue)

    def test_when_it_has_failed_too_often_then_it_fails(self, queue: Queue) -> None:
        queue.configure(max_failures=2)
        job_id = queue.add("a")
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, state=JobState.FAILED, retry_in_ms=0))

        worker.advance(ending(worker.take(), 0, state=JobState.FAILED, retry_in_ms=0))

        view = queue.view(job_id)
        assert (view.state, view.error, view.error_code) == (JobState.FAILED, "it broke", "broke")
        assert queue.look().dead == 1
        check(queue)


class TestGivenKeysOfTheWrongType:
    def test_when_one_jobs_channel_is_a_string_then_that_job_dies_and_its_mates_continue(self, queue: Queue) -> None:
        bad, good = queue.add("bad"), queue.add("good")
        worker = queue.worker("A")
        jobs = {job.id: job for job in worker.pull().jobs}
        queue.client.set(queue.keys.channel(bad), "foreign")

        broken, ok = worker.advance(tokens(jobs[bad], 0, 1), tokens(jobs[good], 0, 1))

        assert isinstance(broken, Broken)
        assert "WRONGTYPE" in broken.reason
        assert ok == Ok()
        assert queue.view(bad).error_code == "broken_key"
        assert queue.look().dead == 1
        assert queue.lease(bad) is None

    def test_when_one_jobs_row_is_a_list_then_its_lease_goes_and_its_mates_continue(self, queue: Queue) -> None:
        bad, good = queue.add("bad"), queue.add("good")
        worker = queue.worker("A")
        jobs = {job.id: job for job in worker.pull().jobs}
        queue.client.delete(queue.keys.job(bad))
        queue.client.rpush(queue.keys.job(bad), "foreign")

        broken, ok = worker.advance(ending(jobs[bad], 0, 1), ending(jobs[good], 0, 1))

        assert isinstance(broken, Broken)
        assert ok == Ok()
        assert queue.state(good) is JobState.DONE
        assert queue.lease(bad) is None
        assert queue.look().running_jobs == 0

    def test_when_another_program_wrote_to_the_channel_then_the_server_refuses_the_entry(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        queue.client.xadd(queue.keys.channel(job_id), {"e": packed(0, 9)}, id="9-0")

        (answer,) = worker.advance(tokens(job, 0, 1))

        assert isinstance(answer, Broken)
        assert queue.state(job_id) is JobState.FAILED


class TestGivenAQueuesKeyOfTheWrongType:
    def test_when_tokens_and_ends_come_then_nothing_of_the_call_is_written(self, queue: Queue) -> None:
        queue.add("a")
        queue.add("b")
        worker = queue.worker("A")
        first, second = worker.pull().jobs
        queue.client.set(queue.keys.key("dead"), "foreign")

        with pytest.raises(redis.ResponseError, match="dead is a string"):
            worker.advance(tokens(first, 0, 1), ending(second, 0, 1, state=JobState.FAILED))

        assert queue.names("channel:*") == set()
        queue.client.delete(queue.keys.key("dead"))
        assert worker.advance(tokens(first, 0, 1), ending(second, 0, 1, state=JobState.FAILED)) == [Ok(), Ok()]
        check(queue)


class TestGivenMoreThanACallTakes:
    def test_when_it_is_made_then_it_is_a_mistake(self, one_queue: Queue) -> None:
        one_queue.add("a")
        worker = one_queue.worker("A")
        job = worker.take()

        with pytest.raises(ValueError, match="257 in one call, 0 with more than tokens; at most 256"):
            calls.advance(one_queue.keys, "A", [tokens(job, i, 1) for i in range(257)])
        with pytest.raises(ValueError, match="65 in one call, 65 with more than tokens; at most 256, and 64"):
            calls.advance(one_queue.keys, "A", [ending(job, 0, 1)] * 65)
        with pytest.raises(ValueError, match="at most 64"):
            calls.submit(one_queue.keys, [new_job(f"j{i}") for i in range(65)])


class TestGivenAnEndedJob:
    """With options, metadata and an idempotency key, and an output of 20 tokens."""

    SPEC = encode_spec(
        JobSpec(
            options=JobOptions(max_tokens=64, temperature=0.7, top_p=0.9, stop=("\n\n",)),
            metadata={"user": "u-1234567", "custom_id": "line-17"},
            model="llama-3-8b",
            batch="nightly",
        )
    )

    @pytest.fixture
    def job_id(self, queue: Queue) -> JobId:
        queue.add("0123456789abcdef01234567", spec=self.SPEC, idempotency_key="order-1234567", batch="nightly")
        worker = queue.worker("host-1234567890-123456-0123456789abcdef")
        job = worker.take()
        end = ending(job, 0, 20, result=b"x" * 150)
        worker.advance(end._replace(first_scheduled_ms=queue.now_ms, first_token_ms=queue.now_ms, fingerprint="f" * 32))
        return job.id

    def test_when_its_channel_is_gone_then_it_takes_at_most_1_2_kb(self, queue: Queue, job_id: JobId) -> None:
        keys = (queue.keys.job(job_id), queue.keys.result(job_id), queue.keys.key("idem", "t", "order-1234567"))

        sizes = {key: queue.client.memory_usage(key, samples=0) for key in keys}

        assert len(self.SPEC) > 64
        assert sum(sizes.values()) <= 1200, sizes
        assert queue.client.keys("*0123456789abcdef01234567*") != []

    def test_when_it_is_looked_at_then_its_spec_is_whole(self, queue: Queue, job_id: JobId) -> None:
        assert queue.view(job_id).spec == self.SPEC
        assert 0 < queue.client.pttl(queue.keys.job(job_id)) <= limits.RESULT_TTL_S * 1000
        check(queue)

    def test_when_it_is_submitted_again_then_it_is_the_same_job(self, queue: Queue, job_id: JobId) -> None:
        again = new_job("0123456789abcdef01234567", spec=self.SPEC, idempotency_key="order-1234567", batch="nightly")

        assert queue.submit(again) == [calls.Duplicate(job_id, JobState.DONE)]

    @pytest.mark.parametrize("num_bytes", [64, 65, 128, 129, 4160, 4161, 20_000])
    def test_when_the_spec_has_any_length_then_it_is_read_as_it_was(self, one_queue: Queue, num_bytes: int) -> None:
        spec = bytes(i % 251 for i in range(num_bytes))
        job_id = one_queue.add("a", spec=spec)
        worker = one_queue.worker("A")
        worker.advance(ending(worker.take(), 0, 1))

        assert one_queue.view(job_id).spec == spec
        check(one_queue)


UNREAD = encode_spec(JobSpec(stream=False))


class TestGivenAJobWhoseWorkerNeedsNoChannel:
    """It is done before its first checkpoint, and nobody follows it."""

    def test_when_it_is_done_then_it_has_its_result_and_no_channel(self, queue: Queue) -> None:
        job_id = queue.add("a", spec=UNREAD)
        worker = queue.worker("A")

        assert worker.advance(silently(worker.take())) == [Ok()]

        assert queue.state(job_id) is JobState.DONE
        assert queue.view(job_id).published == (5,)
        assert queue.client.get(queue.keys.result(job_id)) == b"the result"
        assert not queue.client.exists(queue.keys.channel(job_id))
        check(queue)

    def test_when_the_answer_was_lost_then_it_is_already(self, queue: Queue) -> None:
        queue.add("a", spec=UNREAD)
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(silently(job))

        assert worker.advance(silently(job)) == [Already()]
        check(queue)

    def test_when_a_call_that_failed_has_begun_one_then_it_is_deleted(self, queue: Queue) -> None:
        job_id = queue.add("a", spec=UNREAD)
        worker = queue.worker("A")
        job = worker.take()
        queue.client.xadd(queue.keys.channel(job_id), {"e": packed(0, 3)}, id="3-0")

        assert worker.advance(silently(job)) == [Ok()]

        assert not queue.client.exists(queue.keys.channel(job_id))
        check(queue)

    def test_when_it_is_flagged_then_its_end_stands(self, queue: Queue) -> None:
        job_id = queue.add("a", spec=UNREAD)
        worker = queue.worker("A")
        job = worker.take()
        queue.run(calls.cancel(queue.keys, [job_id]))

        worker.advance(silently(job))

        assert queue.state(job_id) is JobState.DONE
        check(queue)

    @pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
    def test_when_it_ends_otherwise_then_the_call_is_refused(self, queue: Queue, state: JobState) -> None:
        job_id = queue.add("a", spec=UNREAD)
        worker = queue.worker("A")
        job = worker.take()

        with pytest.raises(redis.ResponseError, match="wrong arguments"):
            worker.advance(silently(job, state=state))

        assert queue.state(job_id) is JobState.RUNNING
        check(queue)


def silently(job: calls.LeasedJob, **changes: Any) -> calls.Progress:  # Any: the fields of EndCall
    """The end of a job that needs no channel, with its five tokens."""
    return ending(job, 0, 5, entry=b"", **changes)._replace(entry=b"")
