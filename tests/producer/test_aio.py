"""The asyncio client against a real server, with the worker's side moved by hand."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice.producer import AsyncProducer, Producer, Receipt, StreamEvent
from sluice.producer.errors import InvalidJob, JobCancelled, JobFailed, JobNotFound, ResultTimeout
from sluice.producer.operations.follow import Cursor, Place
from sluice.producer.transport.hub import MAX_NEW_READS
from sluice.producer.transport.links import MAX_ASKS
from sluice.protocol.jobs import Job
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer


@pytest.fixture
async def aproducer(valkey: RedisServer) -> AsyncIterator[AsyncProducer]:
    """A client of the queue `default`."""
    async with AsyncProducer(valkey.url) as client:
        yield client


async def all_of(events: AsyncIterator[StreamEvent]) -> list[StreamEvent]:
    """To the end."""
    return [event async for event in events]


def public_methods(client: type) -> dict[str, list[tuple[str, object, object]]]:
    """The names, kinds and defaults of the arguments of each method."""
    methods = inspect.getmembers(client, inspect.isfunction)
    return {
        name: [(one.name, one.kind, one.default) for one in inspect.signature(method).parameters.values()]
        for name, method in methods
        if not name.startswith("_")
    }


async def _called(producer: AsyncProducer, name: str, jobs: object) -> None:
    await getattr(producer, name)(jobs)


class TestGivenBothClients:
    def test_when_their_methods_are_compared_then_they_take_the_same(self) -> None:
        blocking, on_asyncio = public_methods(Producer), public_methods(AsyncProducer)

        assert blocking == on_asyncio

    @pytest.mark.parametrize("client", [Producer, AsyncProducer])
    def test_when_many_are_submitted_with_a_bad_option_then_the_call_raises(
        self, client: type[Producer | AsyncProducer]
    ) -> None:
        nowhere = client("redis://127.0.0.1:1")

        with pytest.raises(InvalidJob, match="temperature"):
            nowhere.submit_many(["hello"], temperature=-1)
        with pytest.raises(InvalidJob, match="durability"):
            nowhere.submit_many(["hello"], durability="never")
        nowhere.submit_many(["hello"])  # no error: nothing is sent until it is iterated, and there is no server

    @pytest.mark.parametrize("name", ["views", "cancel_many", "requeue", "delete", "results", "stream_many"])
    @pytest.mark.parametrize(
        "one", ["0.default.abc", b"0.default.abc", Receipt(JobId("0.default.abc"))], ids=["id", "bytes", "receipt"]
    )
    async def test_when_one_job_is_given_for_a_list_then_it_is_refused(
        self, aproducer: AsyncProducer, producer: Producer, name: str, one: object
    ) -> None:
        with pytest.raises(InvalidJob, match="expected a list of jobs, got one job"):
            getattr(producer, name)(one)
        with pytest.raises(InvalidJob, match="expected a list of jobs, got one job"):
            await _called(aproducer, name, one)

    @pytest.mark.parametrize("place", [3, Cursor(3, 9)], ids=["offset", "cursor"])
    def test_when_one_job_and_its_place_are_given_for_a_list_then_they_are_refused(
        self, aproducer: AsyncProducer, producer: Producer, place: Place
    ) -> None:
        one: Any = ("0.default.abc", place)  # Any: what pyright refuses too

        for client in (producer, aproducer):
            with pytest.raises(InvalidJob, match="expected a list of jobs, got one job"):
                client.stream_many(one)

    @pytest.mark.parametrize("one", ["hello", b"hello", Job("hello")], ids=["prompt", "bytes", "job"])
    @pytest.mark.parametrize("client", [Producer, AsyncProducer])
    def test_when_one_job_is_submitted_for_a_list_then_the_call_raises(
        self, client: type[Producer | AsyncProducer], one: Any
    ) -> None:
        with pytest.raises(InvalidJob, match="expected a list of jobs, got one job"):
            client("redis://127.0.0.1:1").submit_many(one)

    def test_when_a_job_is_streamed_twice_in_one_call_then_it_is_refused(self, producer: Producer) -> None:
        with pytest.raises(InvalidJob, match="given twice"):
            producer.stream_many(["0.default.a", ("0.default.a", 3)])


class TestGivenAnEmptyQueue:
    async def test_when_a_job_is_submitted_generated_and_read_then_all_of_it_arrives(
        self, aproducer: AsyncProducer, worker: HandWorker
    ) -> None:
        receipt = await aproducer.submit("hello", max_tokens=5)
        [leased] = worker.pull()
        reading = asyncio.create_task(all_of(aproducer.stream(receipt)))
        waiting = asyncio.create_task(aproducer.result(receipt, timeout_s=5))
        for token in range(5):
            worker.say(leased, [token], "x")
            await asyncio.sleep(0)
        worker.say(leased, [], "", end=JobState.DONE, released="!")

        events, result = await reading, await waiting

        assert [token for event in events for token in event.token_ids] == [0, 1, 2, 3, 4]
        assert "".join(event.text for event in events) == result.choices[0].text == "xxxxx!"

    async def test_when_many_are_submitted_from_an_async_iterator_then_answers_come_in_order(
        self, aproducer: AsyncProducer
    ) -> None:
        async def prompts() -> AsyncIterator[str]:
            for i in range(1000):
                yield f"prompt {i}" if i != 500 else ""

        answers = [answer async for answer in aproducer.submit_many(prompts(), max_tokens=3)]

        assert [i for i, answer in enumerate(answers) if isinstance(answer, InvalidJob)] == [500]
        ids = [answer.id for answer in answers if isinstance(answer, Receipt)]
        assert [view.ahead_jobs for view in await aproducer.views(ids) if view is not None] == list(range(999))

    async def test_when_each_other_thing_is_asked_then_it_answers_as_the_waiting_client_does(
        self, aproducer: AsyncProducer, worker: HandWorker
    ) -> None:
        one, two = [await aproducer.submit("hello", batch="b") for _ in range(2)]
        assert (await aproducer.status(two)).ahead_jobs == 1
        assert (await aproducer.queue())[0].waiting_jobs == 2
        assert await aproducer.queues() == {"default": 1}
        assert await aproducer.cancel(two, reason="no") == "cancelled"
        [leased] = worker.pull()
        worker.say(leased, [1], "a", end=JobState.FAILED, error="broken", code="broken")

        with pytest.raises(JobCancelled, match="no"):
            await aproducer.result(two)
        with pytest.raises(JobFailed, match="broken"):
            await all_of(aproducer.stream(one))
        with pytest.raises(JobNotFound):
            await all_of(aproducer.stream("0.default.nobody"))
        outcomes = {outcome.job_id: outcome async for outcome in aproducer.results([one, two])}
        assert type(outcomes[one.id].error) is JobFailed
        assert (await aproducer.batch("b")).ended == 2
        assert await aproducer.requeue([one]) == [True]
        await aproducer.pause()
        assert await aproducer.purge() == 1
        assert await aproducer.delete([one, two]) == [True, True]


class TestGivenManyReaders:
    async def test_when_two_hundred_jobs_are_streamed_at_once_then_few_connections_carry_them(
        self, aproducer: AsyncProducer, worker: HandWorker, redis_client: Any
    ) -> None:
        before = len(redis_client.client_list(_type="normal"))
        ids = [(await aproducer.submit(f"prompt {i}")).id for i in range(200)]
        leased = worker.pull(1000)
        while len(leased) < 200:
            leased += worker.pull(1000)
        readers = [asyncio.create_task(all_of(aproducer.stream(job_id))) for job_id in ids]
        await asyncio.sleep(0.1)
        for job in leased:
            worker.generate(job)

        found = await asyncio.gather(*readers)
        connections = len(redis_client.client_list(_type="normal")) - before

        assert [[token for event in events for token in event.token_ids] for events in found] == [[100, 101, 102]] * 200
        # One that reads for all, and those that asked for states and read old entries as the readers began.
        assert connections <= 1 + MAX_ASKS + MAX_NEW_READS

    async def test_when_two_read_the_same_job_from_different_places_then_each_gets_its_own(
        self, aproducer: AsyncProducer, worker: HandWorker
    ) -> None:
        receipt = await aproducer.submit("hello")
        [leased] = worker.pull()
        worker.say(leased, [1], "a")
        worker.say(leased, [2], "b")
        from_start = asyncio.create_task(all_of(aproducer.stream(receipt)))
        from_one = asyncio.create_task(all_of(aproducer.stream(receipt, 1)))
        await asyncio.sleep(0.05)
        worker.say(leased, [3], "c", end=JobState.DONE)

        texts = ["".join(event.text for event in events) for events in (await from_start, await from_one)]

        assert texts == ["abc", "bc"]

    async def test_when_one_is_cancelled_then_the_others_continue(
        self, aproducer: AsyncProducer, worker: HandWorker
    ) -> None:
        receipt = await aproducer.submit("hello")
        [leased] = worker.pull()
        leaving = asyncio.create_task(all_of(aproducer.stream(receipt)))
        staying = asyncio.create_task(all_of(aproducer.stream(receipt)))
        await asyncio.sleep(0.05)
        leaving.cancel()
        worker.say(leased, [1], "a", end=JobState.DONE)

        events = await staying

        assert leaving.cancelled()
        assert events[-1].end is not None

    async def test_when_the_connection_breaks_then_they_continue(
        self, aproducer: AsyncProducer, worker: HandWorker, redis_client: Any
    ) -> None:
        receipt = await aproducer.submit("hello")
        [leased] = worker.pull()
        reading = asyncio.create_task(all_of(aproducer.stream(receipt)))
        for token in range(5):
            worker.say(leased, [token], "x", end=JobState.DONE if token == 4 else None)
            redis_client.client_kill_filter(_type="normal", skipme=True)
            await asyncio.sleep(0.02)

        events = await reading

        assert [token for event in events for token in event.token_ids] == [0, 1, 2, 3, 4]

    async def test_when_it_takes_too_long_then_it_says_that_the_job_continues(self, aproducer: AsyncProducer) -> None:
        receipt = await aproducer.submit("hello")

        with pytest.raises(ResultTimeout):
            await aproducer.result(receipt, timeout_s=0.1)
        with pytest.raises(ResultTimeout):
            await all_of(aproducer.stream(receipt, timeout_s=0.1))


class TestGivenACallThatIsCancelled:
    @pytest.mark.parametrize("num_turns", range(24))
    async def test_when_it_is_at_any_point_then_it_ends_and_the_next_call_has_its_own_reply(
        self, aproducer: AsyncProducer, num_turns: int
    ) -> None:
        receipt = await aproducer.submit("hello")
        asking = asyncio.create_task(aproducer.status(receipt))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        is_cancelled = asking.cancel()
        await asyncio.wait([asking], timeout=5)

        assert asking.cancelled() == is_cancelled
        assert (await aproducer.queue())[0].waiting_jobs == 1
