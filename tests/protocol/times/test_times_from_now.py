"""Times that a producer gives from now: the server adds its clock, so the producer's clock does not matter."""

from datetime import timedelta
from typing import Any

import pytest

from sluice.producer import Producer
from sluice.protocol import calls
from sluice.protocol.calls import Call, FromNow, PullRequest
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import pack_for_script, unpack_from_script
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from tests.protocol.driving import Queue, check, new_job, short
from tests.servers import RedisServer

KEYS = QueueKeys("default")


class TestGivenAProducerWhoseClockIsBehind:
    """By 90 s: the queue's clock is ahead of this host's."""

    @pytest.fixture
    def producer(self, valkey: RedisServer) -> Any:
        with valkey.client() as client:
            client.hset(KEYS.key("config"), "test_clock_offset_ms", "90000")
        with Producer(valkey.url) as producer:
            yield producer

    @pytest.fixture
    def pulled(self, valkey: RedisServer) -> Any:
        def pull() -> list[str]:
            request = PullRequest(
                incarnation="w", number=1, kv_tokens=10**6, prefill_tokens=10**6, sequences=9, cache_tokens=10**6,
                is_empty=True,
            )  # fmt: skip
            with valkey.client() as client:
                return [job.id for job in run(client, calls.pull(KEYS, request)).jobs]

        return pull

    def test_when_a_deadline_is_from_now_then_the_job_runs(self, producer: Producer, pulled: Any) -> None:
        receipt = producer.submit("hello", deadline=timedelta(seconds=60))

        assert pulled() == [receipt.id]

    def test_when_it_may_start_later_then_it_waits(self, producer: Producer, pulled: Any) -> None:
        producer.submit("hello", not_before=timedelta(seconds=60))

        assert pulled() == []

    def test_when_a_batch_has_a_deadline_from_now_then_its_jobs_run(self, producer: Producer, pulled: Any) -> None:
        receipt = producer.submit("hello", batch="b")
        producer.expire_batch("b", timedelta(seconds=60))

        assert pulled() == [receipt.id]


class TestGivenTimesFromNow:
    def test_when_they_are_submitted_then_they_become_points_in_the_servers_time(self, queue: Queue) -> None:
        job_id = queue.add("a", not_before_ms=FromNow(1000), deadline_ms=FromNow(5000))
        stored = queue.fields("t", "a")

        assert queue.now_ms + 900 <= int(stored["not_before"]) <= queue.now_ms + 1000
        assert queue.now_ms + 4900 <= int(stored["deadline"]) <= queue.now_ms + 5000
        assert short(queue.worker("A").pull().jobs) == []
        queue.pass_time(1000)
        assert queue.worker("B").take().id == job_id
        check(queue)

    def test_when_they_are_too_large_then_they_mean_never(self, queue: Queue) -> None:
        job_id = queue.add("a", deadline_ms=FromNow(2**53), ttl_ms=2**53)

        assert queue.worker("A").take().id == job_id
        check(queue)

    def test_when_time_has_passed_before_the_call_then_less_is_left(self) -> None:
        moment = FromNow(1000)

        assert FromNow(1000, moment.since_s - 0.5).left_ms() <= 500
        assert FromNow(1000, moment.since_s - 2).left_ms() == 0

    @pytest.mark.parametrize("field", ["not_before", "deadline"])
    @pytest.mark.parametrize("value", [-1, 0.5, "x", float("nan")], ids=str)
    def test_when_one_is_no_number_then_nothing_is_written(self, one_queue: Queue, field: str, value: object) -> None:
        row = _row(one_queue)
        row[20 if field == "not_before" else 21] = value

        with pytest.raises(Exception, match="not a new job"):
            _submit_row(one_queue, row)

        assert one_queue.look().waiting_jobs == 0


class TestGivenAnOlderProducer:
    """Its rows end before the times from now; its points in time are kept."""

    def test_when_it_submits_then_its_deadline_is_as_it_says(self, queue: Queue) -> None:
        row = _row(queue, deadline_ms=queue.now_ms + 1000)

        _submit_row(queue, row[:17])

        assert queue.fields("t", "a")["deadline"] == str(queue.now_ms + 1000)
        queue.pass_time(1000)
        queue.fire_timers()
        assert queue.state(new_job("a").id) is JobState.EXPIRED

    def test_when_it_expires_a_batch_then_the_time_is_as_it_says(self, queue: Queue) -> None:
        queue.add("a", batch="b")

        queue.run(Call("expire_batch", queue.keys.fixed(), ("b", queue.now_ms + 1000), lambda reply: reply))

        assert queue.hash_of("batch", "b")["deadline"] == str(queue.now_ms + 1000)


def _row(queue: Queue, **changes: Any) -> list[Any]:  # Any: the fields of NewJob, and what a row holds
    (packed,) = calls.submit(queue.keys, [new_job("a", **changes)]).args
    assert isinstance(packed, bytes)
    (row,) = unpack_from_script(packed)
    return list(row)


def _submit_row(queue: Queue, row: list[Any]) -> object:
    return queue.run(Call("submit", queue.keys.fixed(), (pack_for_script([row]),), lambda reply: reply))
