"""Cancellation of jobs whose readers have left: at once or, if the request may be retried, after a delay.

Requests with the same Idempotency-Key share a job, at any gateway. So Redis stores the number of its readers, which one
left last, and whether a gateway submitted it. The gateway whose reader left last waits, and cancels the job if no
reader has returned. If that gateway stops or is killed meanwhile, nothing cancels the job: the clients that it has
disconnected may return at another gateway, and are promised the job. It runs, or its deadline ends it. A job that
another client of the queue submitted is never cancelled: its owner may not read it yet. A job whose submit was not
answered in time has no reader either, because no client knows its id.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from time import monotonic
from typing import Any, TypeVar, cast

from starlette.requests import Request

from sluice.gateway.essential import essential_task
from sluice.gateway.settings import GatewaySettings
from sluice.producer.aio import AsyncProducer
from sluice.producer.errors import AccessDenied, CertificateRefused, NotAQueue, ProducerError, QueueUnreachable
from sluice.producer.operations.operation import Ask, Operation, Reply
from sluice.producer.operations.queue import Queue, partition_in
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.wire import JobId

CLIENT_LEFT = "its client left"
NOT_ANSWERED = "its submit was not answered in time"
CANCEL_EVERY_S = 1.0
MAX_ABANDONED = 10_000
NUM_LOOKS = 2
"""Attempts to cancel an unknown job: its submit may still be in a socket of the server at the first one."""

COUNT_SPARE_S = 60.0
"""How long a count of readers is kept after the job's deadline and the wait for readers to return."""

LOG = logging.getLogger(__name__)

Answer = TypeVar("Answer")


async def unless_left(request: Request, answer: Awaitable[Answer], leave: Callable[[], None]) -> Answer | None:
    """Wait for an answer while the client is connected; if it leaves, call `leave` and return None."""
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
    """Retrieve the error of a future that is no longer awaited: redis-py may drop its cancellation."""
    if not waiting.cancelled():
        waiting.exception()


async def _client_left(request: Request) -> None:
    # The body has been read, so the next message is the disconnection.
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Readers:
    """The readers of one queue's jobs at one gateway. Changes as clients leave."""

    def __init__(self, producer: AsyncProducer, queue: Queue, settings: GatewaySettings) -> None:
        self._producer, self._queue = producer, queue
        self._return_limit_s = settings.return_limit_s
        self._life_ms = round((settings.request_limit_s + settings.return_limit_s + COUNT_SPARE_S) * 1000)
        self._closing = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self, job_id: JobId, *, is_submitter: bool) -> None:
        """Count a reader of a job that others may read, too; `is_submitter`: its request submitted the job."""
        name = self._name(job_id)
        mark = (("HSET", name, "submitted", 1),) if is_submitter else ()
        await self._producer.run(_ask(("HINCRBY", name, "readers", 1), *mark, ("PEXPIRE", name, self._life_ms)))

    def leave(self, job_id: JobId, *, is_shared: bool) -> None:
        """Cancel a job without readers, in a separate task, because the request's task is being cancelled."""
        task = asyncio.create_task(_quietly(self._leave_shared(job_id) if is_shared else self._cancel(job_id)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Finish the cancellations of jobs that no other client reads; leave those whose clients may return."""
        self._closing.set()
        await asyncio.gather(*self._tasks)

    async def _leave_shared(self, job_id: JobId) -> None:
        name, own = self._name(job_id), token_hex(8)
        # Not repeated: if it were counted twice, the job would be cancelled under another reader.
        left = (("HINCRBY", name, "readers", -1), ("HSET", name, "last", own), ("PEXPIRE", name, self._life_ms))
        await self._producer.run(_ask(*left, is_repeatable=False))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._return_limit_s):
                await self._closing.wait()
                return
        [fields] = await self._producer.run(_ask(("HMGET", name, "readers", "last", "submitted")))
        num_readers, last, submitted = cast("list[bytes | None]", fields)
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


# ---------------------------------------------------------------- submits without an answer


def may_be_accepted(error: ProducerError) -> bool:
    """Return whether the queue may have the job although its submit failed: after an outage, but not a refusal."""
    return isinstance(error, QueueUnreachable) and not isinstance(error, (AccessDenied, CertificateRefused, NotAQueue))


@dataclass(slots=True, eq=False)
class _Left:
    """The remaining attempts for one job. Changes with each answer."""

    until_s: float
    num_looks: int = NUM_LOOKS


class Abandoned:
    """The jobs of one queue that must be cancelled. Changes as submits fail and the server answers.

    Args:
        client: A client of the queue that fails soon while the server is unreachable.
        limit_s: How long to try for each job.
    """

    def __init__(self, client: AsyncProducer, limit_s: float) -> None:
        self._client, self._limit_s = client, limit_s
        self._jobs: dict[JobId, _Left] = {}
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._has_failed = False

    def __len__(self) -> int:
        """Return the number of jobs to cancel."""
        return len(self._jobs)

    def add(self, job_id: JobId) -> None:
        """Cancel a job once the server answers, unless too many jobs wait for that."""
        if len(self._jobs) >= MAX_ABANDONED:
            _log_drop([job_id], f"{MAX_ABANDONED} others wait")
            return
        self._jobs[job_id] = _Left(monotonic() + self._limit_s)
        if not self._closing.is_set() and (self._task is None or self._task.done()):
            self._task = essential_task(self._run(), "abandoned jobs")

    async def close(self) -> None:
        """Try once more, then give up."""
        self._closing.set()
        if self._task is not None:
            await self._task
        await self._cancel_all()
        self._drop(list(self._jobs), "the gateway stops")

    async def _run(self) -> None:
        while self._jobs and not self._closing.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_EVERY_S):
                    await self._closing.wait()
                    return
            await self._cancel_all()
            overdue = [job_id for job_id, left in self._jobs.items() if left.until_s <= monotonic()]
            self._drop(overdue, f"the server did not answer for {self._limit_s:g} s")

    async def _cancel_all(self) -> None:
        """Try each partition separately, so that one on an unreachable shard does not delay the others."""
        by_partition: dict[int, list[JobId]] = {}
        for job_id in self._jobs:
            by_partition.setdefault(partition_in(job_id), []).append(job_id)
        await asyncio.gather(*map(self._cancel, by_partition.values()))

    async def _cancel(self, job_ids: Sequence[JobId]) -> None:
        try:
            answers = await self._client.cancel_many(job_ids, reason=NOT_ANSWERED)
        except ProducerError as error:
            self._note_failure(job_ids, error)
            return
        self._has_failed = False
        for job_id, answer in zip(job_ids, answers, strict=True):
            self._jobs[job_id].num_looks -= 1
            if answer != "unknown" or self._jobs[job_id].num_looks <= 0:
                del self._jobs[job_id]

    def _note_failure(self, job_ids: Sequence[JobId], error: ProducerError) -> None:
        if not may_be_accepted(error):
            self._drop(job_ids, str(error))
        elif not self._has_failed:
            self._has_failed = True
            LOG.warning("Jobs whose submits were not answered wait to be cancelled", extra=_fields(job_ids, str(error)))

    def _drop(self, job_ids: Sequence[JobId], why: str) -> None:
        for job_id in job_ids:
            del self._jobs[job_id]
        if job_ids:
            _log_drop(job_ids, why)


def _log_drop(job_ids: Sequence[JobId], why: str) -> None:
    LOG.warning("Jobs whose submits were not answered are not cancelled", extra=_fields(job_ids, why))


def _fields(job_ids: Sequence[JobId], why: str) -> dict[str, object]:
    return {"fields": {"num_jobs": len(job_ids), "first": job_ids[0], "why": why}}
