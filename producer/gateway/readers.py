"""What becomes of a job whose reader leaves: it is cancelled, at once or, if it may be retried, after a while.

Requests with an Idempotency-Key share a job, at any gateway. So Redis has how many read it, who left last, and whether
a gateway submitted it: the one that was left last waits, and cancels the job if nobody has come back. If it is killed
meanwhile, the job's deadline ends it. A job that another client of the queue submitted is never cancelled: its owner
may not read it yet.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from secrets import token_hex
from typing import Any, TypeVar, cast

from starlette.requests import Request

from sluice.producer.aio import AsyncProducer
from sluice.producer.contract.job_ids import split_job_id
from sluice.producer.contract.wire import JobId
from sluice.producer.errors import ProducerError
from sluice.producer.gateway.settings import GatewaySettings
from sluice.producer.operations.operation import Ask, Operation, Reply
from sluice.producer.operations.queue import Queue

CLIENT_LEFT = "its client left"
NOT_ANSWERED = "its submit was not answered in time"
ABANDON_EVERY_S = 1.0
MAX_ABANDONED = 10_000
NUM_LOOKS = 2
"""A submit may still lie in a socket of the server when it answers the first cancel."""

COUNT_SPARE_S = 60.0
"""How long a count outlives the deadline of its job and the wait for its readers."""


Answer = TypeVar("Answer")


async def unless_left(request: Request, answer: Awaitable[Answer], leave: Callable[[], None]) -> Answer | None:
    """Wait for an answer while the client does; if it leaves, call `leave`, and return None."""
    waiting = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_client_left(request))
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not waiting.done():
            waiting.cancel()
            waiting.add_done_callback(forget)
            leave()
    return waiting.result() if waiting.done() and not waiting.cancelled() else None


def forget(waiting: asyncio.Future[Any]) -> None:  # Any: as `Answer`
    """Take the error of a wait that nobody waits for any more: redis-py may drop its cancellation."""
    if not waiting.cancelled():
        waiting.exception()


async def _client_left(request: Request) -> None:
    # Its body has been read: the next message is that it left.
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Readers:
    """The readers of one queue's jobs at one gateway. Changes as clients leave."""

    def __init__(self, producer: AsyncProducer, queue: Queue, settings: GatewaySettings) -> None:
        self._producer, self._queue = producer, queue
        self._return_limit_s = settings.return_limit_s
        self._life_ms = round((settings.request_limit_s + settings.return_limit_s + COUNT_SPARE_S) * 1000)
        self._closing = asyncio.Event()
        self._abandoned: dict[JobId, int] = {}
        self._abandoning: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self, job_id: JobId, *, is_submitter: bool) -> None:
        """Count a reader of a job that others may read too; `is_submitter`: its request submitted the job."""
        name = self._name(job_id)
        mark = (("HSET", name, "submitted", 1),) if is_submitter else ()
        await self._producer.run(_ask(("HINCRBY", name, "readers", 1), *mark, ("PEXPIRE", name, self._life_ms)))

    def abandon(self, job_id: JobId) -> None:
        """Cancel a job whose submit was not answered, once the server answers and if it has it: nobody knows its id."""
        if len(self._abandoned) < MAX_ABANDONED:
            self._abandoned[job_id] = NUM_LOOKS
        if self._abandoning is None or self._abandoning.done():
            self._abandoning = asyncio.create_task(self._end_abandoned())
            self._tasks.add(self._abandoning)
            self._abandoning.add_done_callback(self._tasks.discard)

    async def _end_abandoned(self) -> None:
        while self._abandoned and not self._closing.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(ABANDON_EVERY_S):
                    await self._closing.wait()
            looked = list(self._abandoned)
            with suppress(ProducerError):
                answers = await self._producer.cancel_many(looked, reason=NOT_ANSWERED)
                for job_id, answer in zip(looked, answers, strict=True):
                    self._note_cancel(job_id, answer)

    def _note_cancel(self, job_id: JobId, answer: str) -> None:
        self._abandoned[job_id] -= 1 if answer == "unknown" else NUM_LOOKS
        if self._abandoned[job_id] <= 0:
            del self._abandoned[job_id]

    def leave(self, job_id: JobId, *, is_shared: bool) -> None:
        """End a job without readers, in a task of its own because that of its request is being cancelled."""
        task = asyncio.create_task(_quietly(self._leave_shared(job_id) if is_shared else self._cancel(job_id)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Finish the cancellations that were begun; wait no longer for clients to come back."""
        self._closing.set()
        await asyncio.gather(*self._tasks)

    async def _leave_shared(self, job_id: JobId) -> None:
        name, own = self._name(job_id), token_hex(8)
        # Sent once: if it counted twice, the job would end under another reader.
        left = (("HINCRBY", name, "readers", -1), ("HSET", name, "last", own), ("PEXPIRE", name, self._life_ms))
        await self._producer.run(_ask(*left, is_repeatable=False))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._return_limit_s):
                await self._closing.wait()
                return
        [found] = await self._producer.run(_ask(("HMGET", name, "readers", "last", "submitted")))
        num_readers, last, submitted = cast("list[bytes | None]", found)
        is_last = num_readers is not None and int(num_readers) <= 0 and last == own.encode()
        if is_last and submitted is not None:
            await self._cancel(job_id)

    async def _cancel(self, job_id: JobId) -> None:
        await self._producer.cancel(job_id, reason=CLIENT_LEFT)

    def _name(self, job_id: JobId) -> str:
        return self._queue.keys_of(job_id).key("readers", *split_job_id(job_id)[1:])


def _ask(*commands: tuple[str | int, ...], is_repeatable: bool = True) -> Operation[list[Reply]]:
    return (yield Ask(commands, is_repeatable))


async def _quietly(work: Coroutine[Any, Any, None]) -> None:  # Any: what asyncio sends
    with suppress(ProducerError):  # the job's deadline ends it
        await work
