"""Clients of a queue whose workers serve four partitions."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from sluice.producer import AsyncProducer, Producer
from sluice.producer.errors import InvalidSetting
from sluice.producer.operations import queue as queue_module
from sluice.producer.operations.dead import DeadFilter
from sluice.protocol.calls import QueueSettings
from sluice.protocol.wire import JobId
from tests.servers import RedisServer

NUM_JOBS = 80
CHOSEN = JobId("3.default.a")


def state(server: RedisServer, partitions: int = 4) -> None:
    """State the number as workers do when they start."""
    with Producer(server.url, partitions=partitions) as owner:
        owner.configure(QueueSettings(partitions=partitions))


OPERATIONS: dict[str, Callable[[Producer], object]] = {
    "submit": lambda producer: producer.submit("hello"),
    "submit_many": lambda producer: list(producer.submit_many(["hello"])),
    "queue": lambda producer: producer.queue(),
    "pause": lambda producer: producer.pause(),
    "purge": lambda producer: producer.purge(),
    "configure": lambda producer: producer.configure(QueueSettings(mode="fair")),
    "batch": lambda producer: producer.batch("b"),
    "close_batch": lambda producer: producer.close_batch("b"),
    "cancel_batch": lambda producer: producer.cancel_batch("b"),
    "expire_batch": lambda producer: producer.expire_batch("b", timedelta(hours=1)),
    "dead": lambda producer: producer.dead(),
    "requeue_dead": lambda producer: producer.requeue_dead(DeadFilter()),
}


class TestGivenAClientThatWasNotToldTheNumber:
    def test_when_it_acts_on_the_queue_then_every_partition_is_meant(self, valkey: RedisServer) -> None:
        state(valkey)

        with Producer(valkey.url) as producer:
            list(producer.submit_many(["hello"] * NUM_JOBS, batch="b"))
            producer.pause()
            views, totals = producer.queue(), producer.batch("b")

            assert len(views) == 4
            assert all(view.is_paused and view.waiting_jobs for view in views)
            assert totals.total == NUM_JOBS
            assert producer.cancel_batch("b").num_ended == NUM_JOBS
            assert producer.queues() == {"default": 4}

    def test_when_it_submits_then_a_chosen_id_may_name_any_partition(self, valkey: RedisServer) -> None:
        state(valkey)

        with Producer(valkey.url) as producer:
            assert producer.submit("hello", job_id=CHOSEN).id == CHOSEN

    async def test_when_it_runs_on_asyncio_then_the_same_holds(self, valkey: RedisServer) -> None:
        state(valkey)

        async with AsyncProducer(valkey.url) as producer:
            receipts = [answer async for answer in producer.submit_many(["hello"] * NUM_JOBS)]
            one = await producer.submit("hello", job_id=CHOSEN)
            views = await producer.queue()

        assert len({str(receipt)[0] for receipt in receipts}) == 4
        assert one.id == CHOSEN
        assert sum(view.waiting_jobs for view in views) == NUM_JOBS + 1

    def test_when_a_worker_starts_later_then_its_number_is_used(
        self, valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Producer(valkey.url) as producer:
            before = producer.submit("hello")
            state(valkey)
            monkeypatch.setattr(queue_module, "KEPT_S", -1)
            after = [producer.submit("hello") for _ in range(NUM_JOBS)]

            assert before.id.startswith("0.")
            assert len({receipt.id[0] for receipt in after}) == 4
            assert len(producer.queue()) == 4


class TestGivenAClientThatWasToldAnotherNumber:
    @pytest.mark.parametrize("name", OPERATIONS)
    def test_when_it_acts_on_the_queue_then_it_is_refused(self, valkey: RedisServer, name: str) -> None:
        state(valkey)

        with Producer(valkey.url, partitions=2) as producer, pytest.raises(InvalidSetting, match="serve 4 partitions"):
            OPERATIONS[name](producer)
