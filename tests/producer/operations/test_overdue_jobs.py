"""Jobs end at their deadline for clients that wait for them, though no worker is alive."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest

from sluice.producer import AsyncProducer, Producer, Receipt
from sluice.producer.errors import JobCancelled, JobExpired, ResultTimeout
from sluice.producer.operations.control import END_EVERY_S
from sluice.protocol.calls import Beat, PullRequest, beat, pull
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from tests.grids import fast_only
from tests.producer.worker_side import HandWorker
from tests.security.acl import set_users, url_of
from tests.servers import RedisServer

DEADLINE_S = 0.4
SPARE_S = 2 * END_EVERY_S
"""A busy machine's."""

SOON = timedelta(seconds=DEADLINE_S)
KEYS = QueueKeys("default")
LEASED_S = 2.0
"""Deadline of a job that is to be leased first, by scripts that the server may still have to load."""

LIFE_MS = 2000


@pytest.fixture
async def aproducer(valkey: RedisServer) -> AsyncIterator[AsyncProducer]:
    """A client of the queue `default`."""
    async with AsyncProducer(valkey.url) as client:
        yield client


def leased_by_a_worker_that_dies(client: Any) -> None:  # Any: redis-py's clients share no typed base
    """The only worker takes what waits, beats once and is never heard of again."""
    short_life = Beat(incarnation="A", held=(), processed_pull=0, expiry_ms=LIFE_MS)
    run(client, beat(KEYS, short_life))
    room = 10**6
    request = PullRequest(
        incarnation="A", number=1, is_empty=True, kv_tokens=room, prefill_tokens=room, sequences=10, cache_tokens=room
    )
    assert run(client, pull(KEYS, request)).jobs


Wait = Callable[[AsyncProducer, Receipt], Awaitable[object]]


async def streamed(producer: AsyncProducer, job: Receipt) -> None:
    async for _ in producer.stream(job):
        pass


async def all_choices(producer: AsyncProducer, job: Receipt) -> None:
    async for _ in producer.stream_choices(job, 2):
        pass


async def one_of_many(producer: AsyncProducer, job: Receipt) -> None:
    async for event in producer.stream_many([job]):
        if event.end is not None and event.end.state is JobState.EXPIRED:
            raise JobExpired(job.id, event.end.error or "")


async def outcome(producer: AsyncProducer, job: Receipt) -> None:
    async for found in producer.results([job]):
        assert found.error is not None
        raise found.error


async def result(producer: AsyncProducer, job: Receipt) -> None:
    await producer.result(job)


WAITS: dict[str, Wait] = {
    "result": result,
    "results": outcome,
    "stream": streamed,
    "stream_choices": all_choices,
    "stream_many": one_of_many,
}


class TestGivenAQueueWithoutWorkers:
    @pytest.mark.parametrize("wait", WAITS)
    @pytest.mark.parametrize("limit", [{"deadline": SOON}, {"ttl_s": DEADLINE_S}], ids=["deadline", "ttl"])
    async def test_when_a_jobs_time_passes_then_the_wait_ends(
        self, aproducer: AsyncProducer, wait: str, limit: dict[str, Any]
    ) -> None:
        job = await aproducer.submit("hi", max_tokens=4, n=2, **limit)
        begin_s = monotonic()

        with pytest.raises(JobExpired):
            async with asyncio.timeout(DEADLINE_S + SPARE_S):
                await WAITS[wait](aproducer, job)

        assert monotonic() - begin_s > DEADLINE_S / 2
        assert (await aproducer.status(job)).state is JobState.EXPIRED

    def test_when_a_thread_waits_then_the_wait_ends_too(self, producer: Producer) -> None:
        jobs = [producer.submit("hi", max_tokens=4, deadline=SOON) for _ in range(2)]

        with pytest.raises(JobExpired):
            producer.result(jobs[0], timeout_s=DEADLINE_S + SPARE_S)
        with pytest.raises(JobExpired):
            list(producer.stream(jobs[1], timeout_s=DEADLINE_S + SPARE_S))

    async def test_when_the_wait_is_shorter_then_it_times_out_as_before(self, aproducer: AsyncProducer) -> None:
        job = await aproducer.submit("hi", max_tokens=4, deadline=timedelta(seconds=60))

        with pytest.raises(ResultTimeout):
            await aproducer.result(job, timeout_s=0.2)

        assert (await aproducer.status(job)).state is JobState.QUEUED

    def test_when_many_others_are_overdue_then_they_do_not_hold_it_up(self, producer: Producer) -> None:
        for _ in producer.submit_many(["hi"] * 500, max_tokens=4, ttl_s=DEADLINE_S / 2):
            pass
        job = producer.submit("hi", max_tokens=4, ttl_s=DEADLINE_S)

        with pytest.raises(JobExpired):
            producer.result(job, timeout_s=DEADLINE_S + SPARE_S)

    async def test_when_hundreds_are_waited_for_then_all_end(self, aproducer: AsyncProducer) -> None:
        answers = [answer async for answer in aproducer.submit_many(["hi"] * 300, max_tokens=4, deadline=SOON)]
        jobs = [answer.id for answer in answers if isinstance(answer, Receipt)]

        async with asyncio.timeout(DEADLINE_S + 5 * SPARE_S):
            outcomes = [one async for one in aproducer.results(jobs)]

        assert len(outcomes) == 300
        assert all(isinstance(one.error, JobExpired) for one in outcomes)


class TestGivenAJobWhoseOnlyWorkerDied:
    @pytest.mark.parametrize("wait", fast_only(["result", "stream"], ["results", "stream_choices", "stream_many"]))
    async def test_when_its_deadline_passes_then_the_wait_ends(
        self, aproducer: AsyncProducer, redis_client: Any, wait: str
    ) -> None:
        redis_client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        job = await aproducer.submit("hi", max_tokens=4, n=2, deadline=timedelta(seconds=LEASED_S))
        leased_by_a_worker_that_dies(redis_client)

        with pytest.raises(JobExpired):
            async with asyncio.timeout(LEASED_S + LIFE_MS / 1000 + SPARE_S):
                await WAITS[wait](aproducer, job)

    def test_when_it_is_cancelled_then_a_wait_ends_after_its_workers_lifetime(
        self, producer: Producer, redis_client: Any
    ) -> None:
        redis_client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        job = producer.submit("hi", max_tokens=4)
        leased_by_a_worker_that_dies(redis_client)

        assert producer.cancel(job) == "asked"
        with pytest.raises(JobCancelled):
            producer.result(job, timeout_s=LIFE_MS / 1000 + 3 * SPARE_S)


class TestGivenAWorkerThatLives:
    async def test_when_the_deadline_passes_then_its_own_end_is_read(
        self, aproducer: AsyncProducer, worker: HandWorker
    ) -> None:
        job = await aproducer.submit("hi", max_tokens=4, deadline=timedelta(seconds=LEASED_S))
        [leased] = worker.pull()
        worker.say(leased, [1], "one")
        with pytest.raises(ResultTimeout):
            await aproducer.result(job, timeout_s=LEASED_S + 0.2)
        status = await aproducer.status(job)
        assert (status.state, status.asked) == (JobState.RUNNING, JobState.EXPIRED)

        worker.say(leased, [], "", end=JobState.EXPIRED)

        with pytest.raises(JobExpired) as caught:
            await aproducer.result(job)
        assert caught.value.partial is not None
        assert caught.value.partial.text == "one"


class TestGivenAUserWhoMayNotFireTimers:
    def test_when_its_job_is_overdue_then_it_asks_once_and_waits_on(self, valkey: RedisServer) -> None:
        set_users(valkey)
        with valkey.client() as client, Producer(url_of(valkey, "acme-submit"), queue="chat") as submitting:
            job = submitting.submit("hi", max_tokens=4, tenant="acme", deadline=timedelta(seconds=0.1))
            client.execute_command("ACL", "LOG", "RESET")
            with Producer(url_of(valkey, "acme-reader"), queue="chat") as reading, pytest.raises(ResultTimeout):
                reading.result(job, timeout_s=0.2 + 2.5 * END_EVERY_S)
            refused = [int(one["count"]) for one in client.acl_log() if one["object"] != "client|setinfo"]
            assert refused == [1]

        with Producer(valkey.url, queue="chat") as other, pytest.raises(JobExpired):
            other.result(job, timeout_s=SPARE_S)
