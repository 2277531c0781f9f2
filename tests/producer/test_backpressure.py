"""A full queue: refused with its state and a suggested wait, or waited for, as the caller likes."""

import asyncio
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner

from sluice.producer import AsyncProducer, Producer
from sluice.producer.cli.main import cli
from sluice.producer.errors import QueueFull
from sluice.protocol.calls import Beat, QueueSettings, beat
from sluice.protocol.redis.execution import run
from tests.integration.jobs import KEYS, submit_all, wait_until
from tests.integration.jobs import Ask as NewAsk
from tests.servers import RedisServer


@pytest.fixture
def full(producer: Producer) -> Producer:
    """A queue that takes two jobs, and has them."""
    producer.configure(QueueSettings(max_waiting_jobs=2))
    for name in ("a", "b"):
        producer.submit(name, job_id=f"0.t.{name}", tenant="t", max_tokens=100)  # pyright: ignore[reportArgumentType]
    return producer


@contextmanager
def room_made_once_asked(client: Any, producer: Producer) -> Generator[None]:  # Any: a redis-py client
    """Cancel a waiting job as soon as a submit has been refused: it then waits."""
    client.config_resetstat()

    def make_room() -> None:
        # A refused submit looks at the queue for how long to wait; no other call does.
        wait_until(lambda: client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0) >= 2, "it asked")
        producer.cancel("0.t.a")

    thread = threading.Thread(target=make_room)
    thread.start()
    yield
    thread.join()


class TestGivenAFullQueue:
    """It takes two jobs and has two; no worker lives."""

    def test_when_a_job_is_submitted_then_the_refusal_has_the_queues_state(self, full: Producer) -> None:
        with pytest.raises(QueueFull) as caught:
            full.submit("c")

        refusal = caught.value
        assert (refusal.reason, refusal.waiting_jobs, refusal.bound) == ("full_jobs", 2, 2)
        assert refusal.waiting_tokens > 0
        assert str(refusal) == "the queue holds 2 jobs and takes 2"

    @pytest.mark.parametrize(("tokens_per_s", "wait_s"), [(None, 5.0), (0.5, 4.04), (1e6, 0.2)])
    def test_when_workers_say_how_fast_they_are_then_the_suggested_wait_follows(
        self, full: Producer, redis_client: Any, tokens_per_s: float | None, wait_s: float
    ) -> None:
        if tokens_per_s is not None:
            about = {"tokens_per_s": str(tokens_per_s)}
            run(
                redis_client,
                beat(KEYS, Beat(incarnation="w", held=(), processed_pull=0, expiry_ms=60_000, about=about)),
            )

        with pytest.raises(QueueFull) as caught:
            full.submit("c")

        assert caught.value.retry_after_s == pytest.approx(wait_s)

    @pytest.mark.parametrize(("tokens_per_s", "wait_s"), [(None, 5.0), (0.5, 4.04)])
    async def test_when_many_are_submitted_then_each_refusal_suggests_what_a_single_one_would(
        self, full: Producer, valkey: RedisServer, redis_client: Any, tokens_per_s: float | None, wait_s: float
    ) -> None:
        if tokens_per_s is not None:
            about = {"tokens_per_s": str(tokens_per_s)}
            run(
                redis_client,
                beat(KEYS, Beat(incarnation="w", held=(), processed_pull=0, expiry_ms=60_000, about=about)),
            )

        answers = list(full.submit_many(["c"] * 600))
        async with AsyncProducer(valkey.url) as producer:
            answers += [answer async for answer in producer.submit_many(["c"] * 600)]

        waits_s = [answer.retry_after_s for answer in answers if isinstance(answer, QueueFull)]
        assert waits_s == [pytest.approx(wait_s)] * 1200

    def test_when_the_caller_waits_and_room_is_made_then_the_job_is_accepted(
        self, full: Producer, redis_client: Any
    ) -> None:
        with room_made_once_asked(redis_client, full):
            receipt = full.submit("c", wait_s=30)

        assert full.status(receipt).state == "queued"

    def test_when_the_caller_waits_in_vain_then_it_is_refused_after_that_time(self, full: Producer) -> None:
        began_s = time.monotonic()

        with pytest.raises(QueueFull):
            full.submit("c", wait_s=0.3)

        assert time.monotonic() - began_s >= 0.3

    async def test_when_an_asyncio_caller_waits_then_others_go_on_meanwhile(
        self, full: Producer, valkey: RedisServer, redis_client: Any
    ) -> None:
        async with AsyncProducer(valkey.url) as producer:
            with room_made_once_asked(redis_client, full):
                waiting = asyncio.create_task(producer.submit("c", wait_s=30))
                status = await producer.status("0.t.b")
                receipt = await waiting

        assert status.state == "queued"
        assert full.status(receipt).state == "queued"

    def test_when_a_person_asks_and_does_not_block_then_the_command_says_what_is_full(
        self, full: Producer, valkey: RedisServer
    ) -> None:
        done = CliRunner().invoke(cli, ["ask", "c", "--block", "0.2", "--redis-url", valkey.url])

        assert isinstance(done.exception, QueueFull)
        assert str(done.exception) == "the queue holds 2 jobs and takes 2"


def test_when_the_history_is_not_written_then_the_refusal_says_so(producer: Producer, redis_client: Any) -> None:
    producer.configure(QueueSettings(max_outbox_entries=3))
    submit_all(redis_client, [NewAsk()])
    producer.submit("b")
    producer.submit("c")

    with pytest.raises(QueueFull) as caught:
        producer.submit("d")

    assert (caught.value.reason, caught.value.bound) == ("outbox_full", 3)
    assert redis_client.xlen(KEYS.outbox) == 3


class TestGivenATenantWithALimitThatFillsItsShare:
    """It may take 6,000 tokens a minute, and others have used the queue."""

    @pytest.mark.parametrize(("tokens_per_s", "rate"), [(None, 100), (50.0, 50), (1e6, 100)])
    def test_when_it_submits_then_the_wait_is_what_its_limit_allows(
        self, producer: Producer, redis_client: Any, tokens_per_s: float | None, rate: int
    ) -> None:
        producer.configure(QueueSettings(max_waiting_jobs=10, tokens_per_minute={"t": 6000}))
        producer.submit("hello", tenant="other")
        about = {} if tokens_per_s is None else {"tokens_per_s": str(tokens_per_s)}
        run(redis_client, beat(KEYS, Beat(incarnation="w", held=(), processed_pull=0, expiry_ms=60_000, about=about)))

        *_, full = producer.submit_many(["hello" * 4000] * 9, tenant="t", max_tokens=100)

        assert isinstance(full, QueueFull)
        assert full.reason == "tenant_full"
        assert full.retry_after_s == pytest.approx(full.waiting_tokens / 100 / rate)
