"""Acts on many jobs: the dead set looked through and sent back by a filter, whole batches cancelled and expired."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from sluice.producer import AsyncProducer, Producer
from sluice.producer.errors import BatchNotFound, InvalidJob, JobCancelled, QueueRefused
from sluice.producer.operations.batches import BatchCancelled
from sluice.producer.operations.dead import DeadFilter
from sluice.producer.operations.results import WAIT_BLOCK_MS
from sluice.protocol import limits
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.integration.jobs import wait_until
from tests.protocol.driving import Queue, check, ending, new_job
from tests.servers import RedisServer


@pytest.fixture
def queue(valkey: RedisServer) -> Iterator[Queue]:
    """The contract's side of a queue, with a clock that tests move."""
    with valkey.client() as client:
        queue = Queue(client)
        queue.stop_clock()
        yield queue


@pytest.fixture
def producer(valkey: RedisServer) -> Iterator[Producer]:
    """A client of the same queue."""
    with Producer(valkey.url, queue="q") as client:
        yield client


def fail(queue: Queue, *names: str, code: str = "broke", tenant: str = "t", batch: str | None = None) -> list[JobId]:
    """Jobs that fail after a token."""
    for at in range(0, len(names), limits.MAX_JOBS_PER_CALL):
        queue.submit(*[new_job(name, tenant, batch=batch) for name in names[at : at + limits.MAX_JOBS_PER_CALL]])
    worker = queue.worker(f"failing-{names[0]}")
    while jobs := worker.pull().jobs:
        worker.advance(*[ending(job, 0, 1, state=JobState.FAILED, error_code=code) for job in jobs])
    return [JobId(f"0.{tenant}.{name}") for name in names]


class TestGivenADeadSet:
    def test_when_it_is_looked_through_then_all_parts_of_a_filter_must_hold(
        self, queue: Queue, producer: Producer
    ) -> None:
        old = fail(queue, "a", "b", code="out_of_memory", tenant="one", batch="x")
        queue.pass_time(60_000)
        new = fail(queue, "c", code="out_of_memory", tenant="two")
        queue.pass_time(1)
        other = fail(queue, "d", tenant="one")

        def found(**wanted: str | float) -> list[JobId]:
            return [view.id for view in producer.dead(DeadFilter(**wanted))]  # pyright: ignore[reportArgumentType]

        assert found() == [*old, *new, *other]
        assert found(error_code="out_of_memory") == [*old, *new]
        assert found(tenant="one") == [*old, *other]
        assert found(batch="x") == old
        assert found(min_age_s=60) == old
        assert found(max_age_s=59) == [*new, *other]
        assert found(error_code="out_of_memory", tenant="one", max_age_s=59) == []
        (view, *_) = producer.dead()
        assert (view.error, view.attempt, view.failures, view.requeues) == ("it broke", 1, 0, 0)

    def test_when_those_of_a_tenant_are_listed_then_the_jobs_of_others_are_not_read(
        self, queue: Queue, producer: Producer
    ) -> None:
        fail(queue, *[f"a{number}" for number in range(50)], tenant="one")
        own = fail(queue, "b", tenant="two")
        queue.client.config_resetstat()

        found = [view.id for view in producer.dead(DeadFilter(tenant="two"))]

        assert found == own
        assert queue.client.info("commandstats")["cmdstat_hgetall"]["calls"] < 10

    def test_when_a_filter_is_requeued_then_those_jobs_alone_go_on_after_their_token(
        self, queue: Queue, producer: Producer
    ) -> None:
        meant, left = fail(queue, "a", "b", code="out_of_memory"), fail(queue, "c")

        assert producer.requeue_dead(DeadFilter(error_code="out_of_memory")) == 2

        assert [queue.state(one) for one in (*meant, *left)] == [JobState.QUEUED, JobState.QUEUED, JobState.FAILED]
        jobs = queue.worker("B").pull().jobs
        assert [(job.id, job.published) for job in jobs] == [(one, (1,)) for one in meant]
        check(queue)

    @pytest.mark.long
    def test_when_it_holds_ten_thousand_then_all_are_listed_once_and_requeued(
        self, queue: Queue, producer: Producer
    ) -> None:
        # One more than it holds: the oldest has made room.
        forgotten, *ids = fail(queue, *[f"j{i:05}" for i in range(limits.DEAD_SET_MAX + 1)])
        assert queue.look().dead == limits.DEAD_SET_MAX
        for key in (queue.keys.job(forgotten), queue.keys.payload(forgotten)):
            assert 0 < queue.client.pttl(key) <= limits.RESULT_TTL_S * 1000
        assert 0 < queue.client.pttl(queue.keys.channel(forgotten)) <= limits.CHANNEL_TTL_S * 1000

        assert sorted(view.id for view in producer.dead()) == ids

        assert producer.requeue_dead(DeadFilter()) == limits.DEAD_SET_MAX
        view = queue.look()
        assert (view.dead, view.waiting_jobs, view.totals["failed"]) == (0, limits.DEAD_SET_MAX, 1)
        assert view.totals["requeued"] == limits.DEAD_SET_MAX

    def test_when_many_failed_in_the_same_millisecond_then_pages_lose_none(
        self, queue: Queue, producer: Producer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sluice.producer.operations.dead.DEAD_PER_PAGE", 3)
        ids = [*fail(queue, *[f"a{i}" for i in range(8)])]
        queue.pass_time(1)
        ids += fail(queue, "b", "c")

        assert [view.id for view in producer.dead()] == ids

    async def test_when_asyncio_asks_then_it_is_the_same(self, queue: Queue, valkey: RedisServer) -> None:
        (job_id,) = fail(queue, "a", batch="b")
        async with AsyncProducer(valkey.url, queue="q") as producer:
            assert [view.id for view in await producer.dead()] == [job_id]
            assert await producer.requeue_dead(DeadFilter(batch="b")) == 1
            assert await producer.cancel_batch("b") == BatchCancelled(1, 0)
            await producer.submit("b", batch="c")
            assert (await producer.expire_batch("c", timedelta(hours=1))).deadline_ms is not None


class TestGivenABatchInTwoPartitions:
    @pytest.fixture
    def producer(self, valkey: RedisServer) -> Iterator[Producer]:
        """A client of a queue with two partitions."""
        with Producer(valkey.url, partitions=2) as client:
            yield client

    def test_when_it_is_cancelled_then_every_job_of_it_ends_and_it_takes_no_more(self, producer: Producer) -> None:
        ids = [str(one) for one in producer.submit_many([f"p{i}" for i in range(700)], batch="b")]
        other = producer.submit("other", batch="c")

        assert producer.cancel_batch("b", reason="wrong file") == BatchCancelled(700, 0)

        views = producer.views(ids)
        assert {(view.state, view.error) for view in views if view} == {(JobState.CANCELLED, "wrong file")}
        total = producer.batch("b")
        assert (total.is_closed, total.total, total.cancelled) == (True, 700, 700)
        assert total.completed_ms is not None
        assert producer.status(other).state is JobState.QUEUED
        with pytest.raises(QueueRefused, match="closed"):
            producer.submit("late", batch="b")
        assert producer.cancel_batch("b") == BatchCancelled(0, 0)

    def test_when_it_gets_a_deadline_then_each_partition_has_it(self, producer: Producer) -> None:
        producer.submit("a", batch="b")

        view = producer.expire_batch("b", timedelta(minutes=5))

        assert view.deadline_ms is not None
        assert 0 < view.deadline_ms - producer.queue()[0].server_ms <= 300_000
        with pytest.raises(InvalidJob, match="deadline must be"):
            producer.expire_batch("b", 5)  # pyright: ignore[reportArgumentType]

    def test_when_its_name_is_wrong_then_each_act_says_so_and_changes_nothing(
        self, queue: Queue, producer: Producer
    ) -> None:
        before = set(queue.client.keys())

        with pytest.raises(BatchNotFound, match="nihgtly"):
            producer.cancel_batch("nihgtly")
        with pytest.raises(BatchNotFound, match="nihgtly"):
            producer.expire_batch("nihgtly", timedelta(minutes=5))
        with pytest.raises(BatchNotFound, match="nihgtly"):
            producer.close_batch("nihgtly")

        assert set(queue.client.keys()) == before


class TestGivenAnUnstartedJobWithChoicesThatIsCancelled:
    """Its end is on the channel of its first choice alone."""

    @pytest.fixture
    def job_id(self, queue: Queue) -> JobId:
        return queue.add("wide", choices=3)

    def waits(self, queue: Queue, job_id: JobId, read: Callable[[], object]) -> None:
        """Cancel the job while a reader is blocked, which must end before it looks by itself."""
        with ThreadPoolExecutor() as pool:
            reader = pool.submit(read)
            wait_until(lambda: queue.client.info("clients")["blocked_clients"] == 1, "it waits")
            queue.cancel(job_id)
            with pytest.raises(JobCancelled):
                reader.result(timeout=WAIT_BLOCK_MS / 1000 / 2)

    def test_when_its_result_is_waited_for_then_that_ends_at_once(
        self, queue: Queue, producer: Producer, job_id: JobId
    ) -> None:
        self.waits(queue, job_id, lambda: producer.result(job_id))

    @pytest.mark.parametrize("choice", [0, 2])
    def test_when_one_choice_is_streamed_then_it_ends_at_once(
        self, queue: Queue, producer: Producer, job_id: JobId, choice: int
    ) -> None:
        self.waits(queue, job_id, lambda: list(producer.stream(job_id, choice=choice)))

    def test_when_all_are_streamed_then_each_has_its_end(self, queue: Queue, producer: Producer, job_id: JobId) -> None:
        ends = list[int]()

        def read() -> None:
            ends.extend(event.choice for event in producer.stream_choices(job_id, 3) if event.end is not None)

        self.waits(queue, job_id, read)
        assert sorted(ends) == [0, 1, 2]

    def test_when_many_started_ones_are_cancelled_then_every_answer_is_final(
        self, queue: Queue, producer: Producer
    ) -> None:
        ids = [queue.add(f"wide{i}", choices=64) for i in range(7)]
        worker = queue.worker("A")
        worker.give_back(*worker.pull().jobs)

        assert producer.cancel_many(ids) == ["cancelled"] * 7
