"""The client against a real server, with the worker's side moved by hand."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.producer import Producer, Receipt, StreamEvent, job
from sluice.producer.errors import (
    BadOffset,
    ChannelExpired,
    IdempotencyConflict,
    InvalidJob,
    InvalidPrompt,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotFound,
    JobTooLarge,
    QueueFull,
    ResultExpired,
    ResultTimeout,
)
from sluice.producer.operations.follow import Cursor
from sluice.producer.operations.results import WAIT_BLOCK_MS
from sluice.protocol.calls import LeasedJob, QueueSettings
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, Message, decode_prompt, encode_entry
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

UNKNOWN = JobId("0.default.nobody")


def text_of(events: list[StreamEvent]) -> str:
    """All that they say."""
    return "".join(event.text for event in events)


def tokens_of(events: list[StreamEvent]) -> list[int]:
    """All their tokens."""
    return [token for event in events for token in event.token_ids]


@pytest.mark.every_server
class TestGivenEachSupportedServer:
    def test_when_a_job_is_submitted_generated_and_read_then_all_of_it_arrives(self, any_redis: RedisServer) -> None:
        with Producer(any_redis.url) as producer, any_redis.client() as client:
            worker = HandWorker(client)
            receipt = producer.submit("Name three rivers.", max_tokens=40)
            assert producer.queue()[0].waiting_jobs == 1
            [leased] = worker.pull()
            assert producer.status(receipt).state is JobState.RUNNING
            worker.say(leased, [1, 2], "Rhine, ")
            worker.say(leased, [3], "Nile", end=JobState.DONE, released=".")

            events = list(producer.stream(receipt))
            result = producer.result(receipt)

        assert decode_prompt(leased.payload) == "Name three rivers."
        assert tokens_of(events) == [1, 2, 3]
        assert text_of(events) == result.choices[0].text == "Rhine, Nile."
        assert [event.end is None for event in events] == [True, True, False]
        assert result.usage.output_tokens == 3


class TestGivenAnEmptyQueue:
    def test_when_jobs_of_each_kind_are_submitted_then_the_worker_gets_what_was_said(
        self, producer: Producer, worker: HandWorker
    ) -> None:
        producer.submit("text")
        producer.submit(messages=[{"role": "user", "content": "chat"}])
        producer.submit(token_ids=[1, 2, 3])

        prompts = [decode_prompt(leased.payload) for leased in worker.pull()]

        assert prompts == ["text", (Message(role="user", content="chat"),), (1, 2, 3)]

    def test_when_the_key_is_used_again_then_the_first_job_is_the_answer(self, producer: Producer) -> None:
        first = producer.submit("hello", idempotency_key="k")

        second = producer.submit("hello", idempotency_key="k")

        assert not first.is_duplicate
        assert (second.id, second.is_duplicate, second.state) == (first.id, True, JobState.QUEUED)

    def test_when_the_key_is_used_for_something_else_then_it_is_a_conflict(self, producer: Producer) -> None:
        first = producer.submit("hello", idempotency_key="k")

        with pytest.raises(IdempotencyConflict) as caught:
            producer.submit("goodbye", idempotency_key="k")

        assert caught.value.job_id == first.id

    def test_when_an_id_is_chosen_then_submitting_twice_is_submitting_once(self, producer: Producer) -> None:
        chosen = JobId("0.default.mine")

        answers = [producer.submit("hello", job_id=chosen) for _ in range(2)]

        assert [(answer.id, answer.is_duplicate) for answer in answers] == [(chosen, False), (chosen, True)]
        assert producer.queue()[0].waiting_jobs == 1

    def test_when_several_wait_then_the_last_knows_what_is_ahead(self, producer: Producer) -> None:
        receipts = [producer.submit("hello", max_tokens=10) for _ in range(3)]

        status = producer.status(receipts[2])

        assert receipts[2].ahead_jobs == status.ahead_jobs == 2
        assert status.ahead_tokens == receipts[2].ahead_tokens
        assert status.ahead_tokens is not None
        assert status.ahead_tokens > 20

    def test_when_there_are_partitions_then_jobs_are_spread_and_found_again(self, valkey: RedisServer) -> None:
        with Producer(valkey.url, partitions=3) as producer:
            receipts = [answer for answer in producer.submit_many(["hello"] * 300) if isinstance(answer, Receipt)]

            waiting = [view.waiting_jobs for view in producer.queue()]
            states = [view.state for view in producer.views(receipts) if view is not None]
            names = producer.queues()

        assert sum(waiting) == 300
        assert min(waiting) > 50
        assert states == [JobState.QUEUED] * 300
        assert names == {"default": 3}

    def test_when_an_unknown_job_is_asked_for_then_every_way_says_so(self, producer: Producer) -> None:
        for ask in (producer.status, producer.result, producer.cancel):
            with pytest.raises(JobNotFound, match=UNKNOWN):
                ask(UNKNOWN)
        with pytest.raises(JobNotFound, match=UNKNOWN):
            list(producer.stream(UNKNOWN))

    def test_when_it_is_no_job_id_at_all_then_it_is_a_misuse(self, producer: Producer) -> None:
        with pytest.raises(InvalidJob, match="not a job id"):
            producer.status("nonsense")


class TestGivenManyJobs:
    def test_when_they_are_submitted_then_answers_and_errors_are_in_order(
        self, producer: Producer, worker: HandWorker
    ) -> None:
        prompts: list[Any] = [f"prompt {i}" for i in range(700)]
        prompts[300] = ""
        prompts[301] = job("own options", max_tokens=7, priority=5)
        prompts[302] = job("bad options", top_p=9)

        answers = list(producer.submit_many(prompts, max_tokens=3))

        kinds = [type(answer) for answer in answers]
        assert kinds[300:303] == [InvalidPrompt, Receipt, InvalidJob]
        assert kinds.count(Receipt) == 698
        ids = [answer.id for answer in answers if isinstance(answer, Receipt)]
        views = [view for view in producer.views(ids) if view is not None]
        assert [view.id for view in views] == ids
        # One after the other on their lane: order is kept across calls.
        ahead = [view.ahead_jobs for view in views if view.priority == 0]
        assert ahead == list(range(697))

    def test_when_a_large_one_is_among_them_then_it_travels_alone(self, producer: Producer) -> None:
        sizes = [10, 3_000_000, 10, 600_000, 600_000, 10]

        answers = list(producer.submit_many("x" * size for size in sizes))

        assert [type(answer) for answer in answers] == [Receipt] * 6

    def test_when_nothing_is_submitted_then_nothing_is_answered(self, producer: Producer) -> None:
        assert list(producer.submit_many([])) == []

    def test_when_shared_options_are_wrong_then_nothing_is_sent(self, producer: Producer) -> None:
        with pytest.raises(InvalidJob, match="top_p"):
            producer.submit_many(["hello"], top_p=9)

        assert producer.queue()[0].waiting_jobs == 0

    def test_when_the_queue_is_full_then_the_rest_is_refused_with_what_waits(self, producer: Producer) -> None:
        producer.configure(QueueSettings(max_waiting_jobs=5))

        answers = list(producer.submit_many(["hello"] * 8))

        assert [type(answer) for answer in answers] == [Receipt] * 5 + [QueueFull] * 3
        with pytest.raises(QueueFull, match="5 jobs") as caught:
            producer.submit("one more")
        assert (caught.value.reason, caught.value.waiting_jobs, caught.value.bound) == ("full_jobs", 5, 5)
        assert caught.value.retry_after_s > 0

    def test_when_one_exceeds_what_workers_hold_then_it_is_too_large(self, producer: Producer) -> None:
        producer.configure(QueueSettings(max_job_tokens=100))

        with pytest.raises(JobTooLarge, match="100"):
            producer.submit(token_ids=[1] * 50, max_tokens=60)

    def test_when_one_states_no_length_then_it_may_have_what_fits(self, producer: Producer) -> None:
        producer.configure(QueueSettings(max_job_tokens=100))

        assert producer.submit(token_ids=[1] * 99, n=2).id
        assert producer.submit(token_ids=[1] * 99, min_tokens=20).id

    def test_when_many_are_followed_then_all_arrive_over_one_connection(
        self, producer: Producer, worker: HandWorker
    ) -> None:
        ids = [producer.submit(f"prompt {i}", n=1).id for i in range(20)]
        for leased in worker.pull():
            worker.generate(leased)

        found: dict[str, list[int]] = {}
        for event in producer.stream_many(ids):
            found.setdefault(event.job_id, []).extend(event.token_ids)

        assert found == {job_id: [100, 101, 102] for job_id in ids}

    def test_when_their_outcomes_are_awaited_then_each_comes_once_with_its_error(
        self, producer: Producer, worker: HandWorker
    ) -> None:
        ids = [producer.submit("hello").id for _ in range(4)]
        done, failed, cancelled, expired = worker.pull()
        worker.generate(done)
        worker.say(failed, [1], "half", end=JobState.FAILED, error="it broke", code="broken")
        worker.say(cancelled, [], "", end=JobState.CANCELLED)
        worker.say(expired, [], "", end=JobState.EXPIRED)

        outcomes = {outcome.job_id: outcome for outcome in producer.results([*ids, UNKNOWN], with_entries=True)}

        kinds = [type(outcomes[job_id].error) for job_id in [*ids, UNKNOWN]]
        assert kinds == [type(None), JobFailed, JobCancelled, JobExpired, JobNotFound]
        result = outcomes[JobId(failed.id)].result
        assert result is not None
        assert result.choices[0].text == "half"
        assert [len(entry.token_ids) for entry in outcomes[JobId(done.id)].entries] == [1, 1, 1, 0]


class TestGivenARunningJob:
    @pytest.fixture
    def running(self, producer: Producer, worker: HandWorker) -> Any:
        """It has said three tokens."""
        producer.submit("hello", max_tokens=10)
        [leased] = worker.pull()
        worker.say(leased, [1, 2], "ab")
        worker.say(leased, [3], "c")
        return leased

    def test_when_a_reader_comes_then_it_has_the_past_at_once_and_the_rest_as_it_comes(
        self, producer: Producer, worker: HandWorker, running: Any
    ) -> None:
        events = producer.stream(running.id)
        past = [next(events), next(events)]
        worker.say(running, [4], "d")
        present = next(events)
        worker.say(running, [5], "e", end=JobState.DONE)
        rest = list(events)

        assert text_of(past) == "abc"
        assert (present.text, present.start, present.offset) == ("d", 3, 4)
        assert text_of(rest) == "e"
        assert rest[-1].end is not None

    @pytest.mark.parametrize("place", [2, "2", "2:2", Cursor(2, 2)], ids=str)
    def test_when_a_reader_comes_back_then_it_resumes_where_it_was(
        self, producer: Producer, worker: HandWorker, running: Any, place: Any
    ) -> None:
        worker.say(running, [4], "d", end=JobState.DONE)

        events = list(producer.stream(running.id, place))

        assert tokens_of(events) == [3, 4]
        assert text_of(events) == "cd"

    @pytest.mark.parametrize("place", [-1, "-1", "abc", "1:2:3", "", 1.5, None, True, "1:x", "end"], ids=repr)
    def test_when_the_place_is_none_then_it_is_an_error_and_not_the_start(
        self, producer: Producer, running: Any, place: Any
    ) -> None:
        with pytest.raises(BadOffset):
            list(producer.stream(running.id, place))

    def test_when_the_place_is_past_all_that_may_come_then_it_is_an_error(
        self, producer: Producer, running: Any
    ) -> None:
        with pytest.raises(BadOffset, match="has 3 tokens; there is nothing after 11"):
            list(producer.stream(running.id, 11))

    def test_when_the_choice_does_not_exist_then_it_is_an_error(self, producer: Producer, running: Any) -> None:
        with pytest.raises(BadOffset, match="choices 0 to 0"):
            list(producer.stream(running.id, choice=1))

    def test_when_the_place_is_within_an_event_then_a_cursor_cuts_it(
        self, producer: Producer, worker: HandWorker, running: Any
    ) -> None:
        worker.say(running, [], "", end=JobState.DONE)

        events = list(producer.stream(running.id, Cursor(1, 1)))

        assert tokens_of(events) == [2, 3]
        assert text_of(events) == "bc"

    def test_when_a_bare_offset_is_within_an_event_then_that_event_comes_whole(
        self, producer: Producer, worker: HandWorker, running: Any
    ) -> None:
        worker.say(running, [4, 5, 6], "def", released="!", end=JobState.DONE)
        whole = list(producer.stream(running.id))

        for offset in range(7):
            events = list(producer.stream(running.id, offset))

            assert events[0].start <= offset, "no token is lost"
            assert all(event.offset <= offset for event in whole[: -len(events)]), "no earlier event comes"
            assert [event[:-1] for event in events] == [event[:-1] for event in whole[-len(events) :]]

    def test_when_it_began_at_a_bare_offset_then_its_cursors_resume_exactly(
        self, producer: Producer, worker: HandWorker, running: Any
    ) -> None:
        worker.say(running, [4], "d", end=JobState.DONE)

        first = next(producer.stream(running.id, 1))

        assert first.cursor == "2:2"
        assert text_of(list(producer.stream(running.id, first.cursor))) == "cd"

    def test_when_entries_are_resent_after_a_bare_offset_then_the_reader_is_told(
        self, producer: Producer, worker: HandWorker, running: Any, redis_client: Any
    ) -> None:
        events = producer.stream(running.id, 2, timeout_s=10)
        next(events)
        channel = worker.keys.channel(running.id)
        redis_client.delete(channel)
        entry = encode_entry(start=0, token_ids=(1, 2, 3, 4), text="abcd", time_ms=0)
        redis_client.xadd(channel, {"e": entry}, id="4-0")

        with pytest.raises(BadOffset, match="3 tokens alone do not say where the rest of the text begins"):
            next(events)

    def test_when_its_result_is_awaited_too_briefly_then_it_says_that_the_job_continues(
        self, producer: Producer, running: Any
    ) -> None:
        begin_s = time.monotonic()

        with pytest.raises(ResultTimeout, match="still running"):
            producer.result(running.id, timeout_s=0.2)
        with pytest.raises(TimeoutError):
            list(producer.stream(running.id, timeout_s=0.2))

        assert time.monotonic() - begin_s < WAIT_BLOCK_MS / 1000

    def test_when_its_result_is_awaited_then_the_end_wakes_the_waiter(
        self, producer: Producer, worker: HandWorker, running: Any
    ) -> None:
        found: list[tuple[str, float]] = []

        def wait() -> None:
            text = producer.result(running.id, timeout_s=10).choices[0].text
            found.append((text, time.monotonic()))

        waiter = threading.Thread(target=wait)
        waiter.start()
        for token in range(4, 9):
            worker.say(running, [token], "x")
        ended_s = time.monotonic()
        worker.say(running, [], "", end=JobState.DONE)
        waiter.join()

        assert found[0][0] == "abcxxxxx"
        assert found[0][1] - ended_s < WAIT_BLOCK_MS / 1000

    def test_when_it_is_cancelled_then_the_worker_ends_it_with_the_tokens_so_far(
        self, producer: Producer, worker: HandWorker, running: Any
    ) -> None:
        asked = producer.cancel(running.id, reason="no longer needed")
        worker.say(running, [], "", end=JobState.CANCELLED, error="no longer needed")

        assert asked == "asked"
        assert producer.cancel(running.id) == "cancelled"
        with pytest.raises(JobCancelled, match="no longer needed") as caught:
            producer.result(running.id)
        assert caught.value.partial is not None
        assert caught.value.partial.choices[0].text == "abc"
        with pytest.raises(JobCancelled) as streamed:
            list(producer.stream(running.id))
        assert streamed.value.partial == caught.value.partial

    def test_when_another_worker_takes_it_over_then_the_reader_sees_no_seam(
        self, producer: Producer, worker: HandWorker, running: Any, redis_client: Any
    ) -> None:
        events = producer.stream(running.id)
        seen = [next(events), next(events)]
        worker.deregister([running])
        other = HandWorker(redis_client, incarnation="other", outputs=worker.outputs)
        [leased] = other.pull()
        other.say(leased, [4], "d", end=JobState.DONE)

        seen += events

        assert leased.published == (3,)
        assert tokens_of(seen) == [1, 2, 3, 4]
        assert text_of(seen) == "abcd"

    def test_when_entries_are_resent_with_other_bounds_then_no_token_comes_twice(
        self, producer: Producer, worker: HandWorker, running: Any, redis_client: Any
    ) -> None:
        worker.say(running, [4, 5], "de")
        events = producer.stream(running.id, timeout_s=10)
        seen = [next(events) for _ in range(3)]
        channel = worker.keys.channel(running.id)
        redis_client.delete(channel)
        for start, token_ids, text in ((0, (1, 2, 3), "abc"), (3, (4, 5, 6), "def"), (6, (7,), "g")):
            entry = encode_entry(start=start, token_ids=token_ids, text=text, time_ms=0)
            redis_client.xadd(channel, {"e": entry}, id=f"{start + len(token_ids)}-0")

        seen.append(next(events))

        assert tokens_of(seen) == [1, 2, 3, 4, 5, 6, 7]
        assert text_of(seen) == "abcdefg"


class TestGivenARunningJobThatIsNotStreamed:
    """Its worker has it done before its first checkpoint, so it has no channel."""

    @pytest.fixture
    def quiet(self, producer: Producer, worker: HandWorker) -> LeasedJob:
        producer.submit("quiet", stream=False)
        [job] = worker.pull()
        return job

    def test_when_its_result_is_awaited_then_its_end_is_seen(
        self, producer: Producer, worker: HandWorker, quiet: LeasedJob
    ) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(producer.result, quiet.id, timeout_s=30)
            worker.end_silently(quiet, [1, 2], "so quiet")

            assert waiting.result().choices[0].text == "so quiet"

    def test_when_it_is_followed_all_the_same_then_its_output_comes_at_its_end(
        self, producer: Producer, worker: HandWorker, quiet: LeasedJob
    ) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: list(producer.stream(quiet.id, timeout_s=30)))
            worker.end_silently(quiet, [1, 2], "so quiet")

            [event] = waiting.result()
        assert (event.text, event.token_ids) == ("so quiet", (1, 2))
        assert event.end is not None
        assert event.end.state is JobState.DONE


class TestGivenAWaitingJob:
    def test_when_it_is_cancelled_then_it_has_ended_and_readers_hear_it(self, producer: Producer) -> None:
        receipt = producer.submit("hello")

        reached = producer.cancel(receipt, reason="never mind")

        assert reached == "cancelled"
        events: list[StreamEvent] = []
        with pytest.raises(JobCancelled, match="never mind"):
            events.extend(producer.stream(receipt))
        with pytest.raises(JobCancelled):
            producer.result(receipt)

    def test_when_the_queue_is_purged_then_all_are_cancelled(self, producer: Producer) -> None:
        ids = [producer.submit("hello", tenant=tenant).id for tenant in ("a", "b") for _ in range(50)]

        assert producer.purge(tenant="a") == 50
        assert producer.purge() == 50

        assert producer.cancel_many([*ids, UNKNOWN]) == ["cancelled"] * 100 + ["unknown"]

    def test_when_the_queue_is_paused_then_workers_get_nothing_until_it_is_resumed(
        self, producer: Producer, worker: HandWorker
    ) -> None:
        producer.submit("hello")

        producer.pause()
        assert worker.pull() == []
        assert producer.queue()[0].is_paused
        producer.pause(is_paused=False)

        assert len(worker.pull()) == 1


class TestGivenAFailedJob:
    @pytest.fixture
    def failed(self, producer: Producer, worker: HandWorker) -> Any:
        """It said one token."""
        producer.submit("hello")
        [leased] = worker.pull()
        worker.say(leased, [1], "a", end=JobState.FAILED, error="the model fell over", code="nan_logits")
        return leased

    def test_when_it_is_streamed_then_its_tokens_come_first_and_then_the_error(
        self, producer: Producer, failed: Any
    ) -> None:
        events: list[StreamEvent] = []

        with pytest.raises(JobFailed, match="the model fell over") as caught:
            events.extend(_collected(producer.stream(failed.id), events))

        assert caught.value.code == "nan_logits"
        assert tokens_of(events) == [1]

    def test_when_many_are_streamed_then_its_end_says_so_and_nothing_is_raised(
        self, producer: Producer, failed: Any
    ) -> None:
        events = list(producer.stream_many([failed.id]))

        end = events[-1].end
        assert end is not None
        assert (end.state, end.error, end.error_code) == (JobState.FAILED, "the model fell over", "nan_logits")

    def test_when_it_is_requeued_then_it_continues_and_readers_at_its_end_see_the_rest(
        self, producer: Producer, worker: HandWorker, failed: Any
    ) -> None:
        assert producer.requeue([failed.id, UNKNOWN]) == [True, False]
        [leased] = worker.pull()
        worker.say(leased, [2], "b", end=JobState.DONE)

        events = list(producer.stream(failed.id, 1))

        assert tokens_of(events) == [2]
        assert producer.result(failed.id).choices[0].text == "ab"

    def test_when_it_is_deleted_then_it_is_unknown(self, producer: Producer, failed: Any) -> None:
        waiting = producer.submit("waits")

        assert producer.delete([failed.id, waiting]) == [True, False]

        with pytest.raises(JobNotFound):
            producer.status(failed.id)


def _collected(events: Iterator[StreamEvent], into: list[StreamEvent]) -> Iterator[StreamEvent]:
    """Keep each event, even when an error follows."""
    for event in events:
        into.append(event)
    return iter(())


class TestGivenAnEndedJobWhoseChannelHasExpired:
    @pytest.fixture
    def ended(self, producer: Producer, worker: HandWorker, redis_client: Any) -> Any:
        """Its result is still kept."""
        producer.submit("hello", logprobs=0)
        [leased] = worker.pull()
        worker.say(leased, [1, 2], "ab", has_logprobs=True)
        worker.say(leased, [3], "c", end=JobState.DONE, released="!", has_logprobs=True)
        redis_client.delete(worker.keys.channel(leased.id))
        return leased

    def test_when_it_is_read_from_the_start_then_all_comes_from_the_result(
        self, producer: Producer, ended: Any
    ) -> None:
        [event] = producer.stream(ended.id)

        assert (event.token_ids, event.text, event.cursor) == ((1, 2, 3), "abc!", "3:4:end")
        assert event.logprobs is not None
        assert len(event.logprobs) == 3

    def test_when_it_is_read_from_a_cursor_then_the_rest_is_cut_exactly(self, producer: Producer, ended: Any) -> None:
        [event] = producer.stream(ended.id, "2:2")

        assert (event.start, event.token_ids, event.text) == (2, (3,), "c!")

    def test_when_it_is_read_after_its_end_then_nothing_comes(self, producer: Producer, ended: Any) -> None:
        assert list(producer.stream(ended.id, "3:4:end")) == []

    def test_when_it_is_read_from_a_bare_offset_then_uncut_text_is_refused(
        self, producer: Producer, ended: Any
    ) -> None:
        with pytest.raises(ChannelExpired, match="cursor"):
            list(producer.stream(ended.id, 2))

    def test_when_the_result_has_expired_too_then_it_says_so(
        self, producer: Producer, worker: HandWorker, ended: Any, redis_client: Any
    ) -> None:
        redis_client.delete(worker.keys.result(ended.id))

        with pytest.raises(ResultExpired):
            list(producer.stream(ended.id))
        with pytest.raises(ResultExpired):
            producer.result(ended.id)


class TestGivenAJobWithChoices:
    def test_when_they_are_generated_then_each_has_a_channel_and_the_result_has_all(
        self, producer: Producer, worker: HandWorker
    ) -> None:
        receipt = producer.submit("hello", n=3)
        [leased] = worker.pull()
        for choice in (2, 0, 1):
            worker.say(leased, [choice], f"choice {choice}", choice=choice, end=JobState.DONE)

        texts = [text_of(list(producer.stream(receipt, choice=choice))) for choice in range(3)]
        result = producer.result(receipt, timeout_s=5)

        assert texts == ["choice 0", "choice 1", "choice 2"]
        assert [choice.text for choice in result.choices] == texts


class TestGivenABatch:
    def test_when_its_jobs_end_then_the_queue_counts_them(self, producer: Producer, worker: HandWorker) -> None:
        list(producer.submit_many(["hello"] * 3, batch="b"))
        one, _, _ = worker.pull()
        worker.generate(one)

        batch = producer.batch("b")

        assert (batch.total, batch.done, batch.ended) == (3, 1, 1)
        assert producer.batch("unknown").total == 0


class TestGivenAnyOutput:
    @settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        pieces=st.lists(
            st.tuples(st.lists(st.integers(0, 999), min_size=1, max_size=4), st.text(max_size=5)), max_size=6
        ),
        released=st.text(max_size=4),
        data=st.data(),
    )
    def test_when_a_reader_breaks_off_anywhere_then_the_two_halves_make_the_whole(
        self, producer: Producer, worker: HandWorker, redis_client: Any, pieces: Any, released: str, data: st.DataObject
    ) -> None:
        receipt = producer.submit("hello", max_tokens=100)
        [leased] = worker.pull()
        for token_ids, text in pieces:
            worker.say(leased, token_ids, text)
        worker.say(leased, [], "", end=JobState.DONE, released=released)
        whole = list(producer.stream(receipt))

        cut = data.draw(st.integers(0, len(whole)))
        has_expired = data.draw(st.booleans())
        first = whole[:cut]
        if has_expired:
            redis_client.delete(worker.keys.channel(receipt.id))
        rest = list(producer.stream(receipt, first[-1].cursor if first else 0))

        result = producer.result(receipt).choices[0]
        assert tokens_of(first) + tokens_of(rest) == list(result.token_ids)
        assert text_of(first) + text_of(rest) == result.text


class TestGivenWhatWorkersCanDo:
    def test_when_a_job_needs_more_then_it_is_refused_by_name_and_others_are_taken(self, producer: Producer) -> None:
        producer.configure(QueueSettings(features=("choices",)))

        with pytest.raises(InvalidJob, match="logprobs"):
            producer.submit("hello", logprobs=2)

        assert producer.submit("hello", n=2).id

    def test_when_no_worker_has_come_yet_then_everything_is_taken(self, producer: Producer) -> None:
        receipt = producer.submit("hello", logprobs=2, n=2, logit_bias={5: 1.0}, repetition_penalty=1.1)

        assert producer.status(receipt).choices == 2
