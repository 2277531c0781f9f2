"""One asyncio client in several event loops: one after another, at once, interrupted, cancelled, after a fork."""

import asyncio
import gc
import multiprocessing
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from sluice.producer import AsyncProducer, Receipt, StreamEvent
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.late_replies import late_replies
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

SOON_S = 2e-5


@pytest.fixture
def client(valkey: RedisServer) -> AsyncProducer:
    """A client that no loop has used; each closes its own connections."""
    return AsyncProducer(valkey.url)


def _num_connections(server: RedisServer) -> int:
    with server.client() as plain:
        return [one["name"] for one in plain.client_list()].count("sluice-producer")


async def _submit_and_look(client: AsyncProducer, job_id: str) -> JobId:
    receipt = await client.submit("hello", max_tokens=2, job_id=JobId(job_id))
    assert not receipt.is_duplicate
    return (await client.status(receipt)).id


class TestGivenLoopsOneAfterAnother:
    def test_when_each_submits_then_each_job_is_accepted_once(self, client: AsyncProducer, valkey: RedisServer) -> None:
        ids = [f"0.default.loop{number}" for number in range(20)]

        found = [asyncio.run(_submit_and_look(client, job_id)) for job_id in ids]

        assert found == ids
        assert _num_connections(valkey) == 0

    def test_when_each_follows_a_job_then_each_reads_all_of_it(self, client: AsyncProducer, worker: HandWorker) -> None:
        async def read(receipt: Receipt) -> str:
            return "".join([event.text async for event in client.stream(receipt)])

        for number in range(3):
            receipt = asyncio.run(_submitted(client))
            [leased] = worker.pull(1000)
            worker.say(leased, [1, 2], f"text {number}", end=JobState.DONE)

            assert asyncio.run(read(receipt)) == f"text {number}"

    def test_when_a_loop_ends_within_a_stream_then_the_next_one_works(
        self, client: AsyncProducer, valkey: RedisServer
    ) -> None:
        async def begin() -> None:
            receipt = await client.submit("hello")
            reading = asyncio.create_task(_first_of(client, receipt.id))
            await asyncio.sleep(0)
            assert not reading.done()  # `asyncio.run` cancels it

        for _ in range(3):
            asyncio.run(begin())

        assert _num_connections(valkey) == 0

    def test_when_loops_are_closed_without_a_shutdown_then_nothing_grows(
        self, client: AsyncProducer, valkey: RedisServer
    ) -> None:
        with pytest.warns(ResourceWarning):  # as for any transport that outlives its loop
            _use_in_loops_that_are_only_closed(client)

        assert _num_connections(valkey) == 0

    @pytest.mark.long
    def test_when_there_were_thousands_then_nothing_has_grown(self, client: AsyncProducer, valkey: RedisServer) -> None:
        for number in range(50):
            asyncio.run(_submit_and_look(client, f"0.default.warm{number}"))
        gc.collect()
        before = len(gc.get_objects())

        for number in range(3000):
            asyncio.run(_submit_and_look(client, f"0.default.many{number}"))

        gc.collect()
        assert len(gc.get_objects()) - before < 500
        assert _num_connections(valkey) == 0


def _use_in_loops_that_are_only_closed(client: AsyncProducer) -> None:
    for number in range(10):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(_submit_and_look(client, f"0.default.closed{number}"))
        loop.close()
    asyncio.run(_submit_and_look(client, "0.default.last"))
    loop = None
    gc.collect()


async def _submitted(client: AsyncProducer) -> Receipt:
    return await client.submit("hello", max_tokens=2)


class TestGivenLoopsAtOnce:
    def test_when_threads_have_a_loop_each_then_each_call_gets_its_own_answer(
        self, client: AsyncProducer, valkey: RedisServer
    ) -> None:
        async def calls(name: int) -> list[JobId]:
            return [await _submit_and_look(client, f"0.default.t{name}x{number}") for number in range(10)]

        def run(name: int) -> list[JobId]:
            return asyncio.run(calls(name))

        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(run, range(6)))

        assert found == [[f"0.default.t{name}x{number}" for number in range(10)] for name in range(6)]
        assert _num_connections(valkey) == 0

    def test_when_one_loop_closes_the_client_then_the_other_loop_closes_its_part(
        self, client: AsyncProducer, valkey: RedisServer
    ) -> None:
        other = asyncio.new_event_loop()
        thread = threading.Thread(target=other.run_forever)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(_submitted(client), other).result(10)

            async def close() -> None:
                await client.submit("hello")
                await client.close()

            asyncio.run(close())
            until_s = time.monotonic() + 10
            while _num_connections(valkey) and time.monotonic() < until_s:
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), other).result(10)

            assert _num_connections(valkey) == 0
            asyncio.run_coroutine_threadsafe(_submitted(client), other).result(10)  # it connects again
            asyncio.run_coroutine_threadsafe(client.close(), other).result(10)
        finally:
            other.call_soon_threadsafe(other.stop)
            thread.join()
            other.close()

    def test_when_a_process_forks_then_parent_and_child_get_their_own_answers(
        self, client: AsyncProducer, valkey: RedisServer
    ) -> None:
        async def both() -> tuple[JobId, int | None]:
            await _submit_and_look(client, "0.default.before")
            reading = asyncio.create_task(_first_of(client, "0.default.before"))
            await _blocked(valkey)
            child = multiprocessing.get_context("fork").Process(target=_in_child, args=(client,))
            child.start()
            await asyncio.to_thread(child.join, 20)
            found = await _submit_and_look(client, "0.default.after")
            reading.cancel()
            return found, child.exitcode

        assert asyncio.run(both()) == ("0.default.after", 0)


async def _first_of(client: AsyncProducer, job_id: str) -> StreamEvent:
    return await anext(aiter(client.stream(job_id)))


async def _blocked(server: RedisServer) -> None:
    """Wait until a read of the client blocks at the server."""
    with server.client() as plain:
        while not any(one["cmd"] == "xread" for one in plain.client_list()):  # noqa: ASYNC110  # the server has it
            await asyncio.sleep(0)


def _in_child(client: AsyncProducer) -> None:
    asyncio.events._set_running_loop(None)  # pyright: ignore[reportAttributeAccessIssue] (the parent's runs here, too)
    for number in range(3):
        job_id = f"0.default.child{number}"
        assert asyncio.run(_submit_and_look(client, job_id)) == job_id


class TestGivenCallsThatEndEarly:
    def test_when_tasks_are_cancelled_anywhere_then_others_get_their_own_answers(self, valkey: RedisServer) -> None:
        chance = random.Random(3)

        async def calls(client: AsyncProducer) -> None:
            asked = [await client.submit(f"prompt {number}") for number in range(4)]
            for _ in range(30):
                tasks = [asyncio.create_task(client.status(receipt)) for receipt in asked]
                await asyncio.sleep(chance.uniform(0, 0.006))
                for task in chance.sample(tasks, 2):
                    task.cancel()
                found = await asyncio.gather(*tasks, return_exceptions=True)
                for receipt, one in zip(asked, found, strict=True):
                    assert isinstance(one, asyncio.CancelledError) or _id_of(one) == receipt.id
            await client.close()

        with late_replies(valkey.socket_path, 0.002) as url:
            asyncio.run(calls(AsyncProducer(url)))

    # An interrupt may come between the call of a lock's `__aexit__` and its `await`: CPython warns of such a coroutine.
    @pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_when_ctrl_c_ends_calls_of_a_notebook_then_the_next_ones_get_their_answers(
        self, valkey: RedisServer, alarm: Callable[[float], None]
    ) -> None:
        chance = random.Random(4)
        loop = asyncio.new_event_loop()  # a notebook's, which goes on after an interrupt
        with late_replies(valkey.socket_path, 0.002) as url:
            client = AsyncProducer(url)
            asked = [loop.run_until_complete(_submitted(client)) for _ in range(2)]
            for _ in range(30):
                task = loop.create_task(client.status(asked[0]))
                try:
                    alarm(chance.uniform(1e-5, 0.008))
                    loop.run_until_complete(task)
                    alarm(0)
                except KeyboardInterrupt:
                    _end(loop, task)
                for receipt in asked:
                    looked = loop.run_until_complete(asyncio.wait_for(client.status(receipt), 10))
                    assert looked.id == receipt.id
            loop.run_until_complete(client.close())
        loop.close()
        # Here and not in a later test, which would be told of that coroutine.
        gc.collect()


def _end(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    """Run a loop until a task has ended: asyncio raises a KeyboardInterrupt once more for each task that it passes."""
    task.cancel()
    while not task.done():
        with suppress(KeyboardInterrupt):
            loop.run_until_complete(_ended(task))
    _ = task.cancelled() or task.exception()


async def _ended(task: asyncio.Task[Any]) -> None:
    await asyncio.wait((task,))


def _id_of(found: Any) -> JobId:
    if isinstance(found, BaseException):
        raise found
    return found.id


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Raises KeyboardInterrupt after some seconds; 0 calls it off.

    Not amid asyncio's own code, where an interrupt may lose what wakes a task, whatever the task is, but right after.
    """

    def interrupt(_number: int, frame: FrameType | None) -> None:
        if frame is not None and "/asyncio/" in frame.f_code.co_filename:
            signal.setitimer(signal.ITIMER_REAL, SOON_S)
        else:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
