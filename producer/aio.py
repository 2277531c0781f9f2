"""The client for asyncio: `AsyncProducer`. The same operations as `client.py`, awaited.

    async with AsyncProducer() as producer:
        job = await producer.submit("Name three rivers.", max_tokens=40)
        async for event in producer.stream(job):
            print(event.text, end="")

It only runs what `commands.py` and `following.py` say.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

from producer import commands, config, control, following
from producer.client import AnyJob, server_url, terms_of
from producer.cluster import AsyncClusterPipe, open_async_link
from producer.commands import (
    STEPS,
    Ask,
    Chunk,
    JobStatus,
    Packer,
    Pause,
    Queue,
    Read,
    Receipt,
    Reply,
    Step,
    SubmitAnswer,
    channel_entries,
)
from producer.contract.calls import BatchView, JobView, QueueSettings, QueueView
from producer.contract.wire import JobId, JobResult
from producer.control import BatchCancelled, DeadFilter
from producer.errors import ProducerError
from producer.following import Place, Reader, StreamEvent
from producer.hub import Hub
from producer.jobs import Job, Moment, Options, PromptLike, Workshop, only_prompt, template
from producer.links import AsyncPipe, LinkSettings
from producer.outcomes import Outcome, outcomes
from producer.room import Waits, submit_within

if TYPE_CHECKING:
    from producer.history import JobRow

Result = TypeVar("Result")


class AsyncProducer:
    """Submit jobs, follow their tokens, ask for results, from one event loop. Arguments and errors as in `Producer`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        queue: str = "default",
        partitions: int = 1,
        durability: str | None = None,
        database_url: str | None = None,
        patience_s: float = 30.0,
    ) -> None:
        self._queue = Queue(queue, partitions)
        self._terms = terms_of(durability, patience_s)
        self._link = open_async_link(LinkSettings(server_url(url), patience_s))
        self._hub = Hub(self._link.ask_blocking)
        self._database_url = config.database_url(database_url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncProducer({self._link!r}, queue={self._queue.name!r})"

    async def close(self) -> None:
        """Close the connections. Jobs go on."""
        await self._hub.close()
        await self._link.close()

    # ------------------------------------------------------------ submit

    async def submit(
        self,
        prompt: PromptLike | None = None,
        *,
        messages: PromptLike | None = None,
        token_ids: Sequence[int] | None = None,
        durability: str | None = None,
        wait_s: float = 0.0,
        **options: Unpack[Options],
    ) -> Receipt:
        """As `Producer.submit`."""
        made = template(options, partitions=self._queue.partitions).new_job(only_prompt(prompt, messages, token_ids))
        assurance = await self._run(self._terms.agree(self._queue, durability))
        is_chosen = options.get("job_id") is not None
        return await self._run(
            submit_within(wait_s, lambda: commands.submit(self._queue, made, assurance, is_chosen=is_chosen))
        )

    async def submit_many(
        self,
        jobs: Iterable[PromptLike | Job] | AsyncIterable[PromptLike | Job],
        *,
        durability: str | None = None,
        **options: Unpack[Options],
    ) -> AsyncIterator[SubmitAnswer]:
        """As `Producer.submit_many`; the jobs may come from an asynchronous iterator."""
        workshop = Workshop(options, partitions=self._queue.partitions)
        packer = Packer(self._queue, await self._run(self._terms.agree(self._queue, durability)))
        waiting, waits = deque[Chunk](), Waits(self._queue)
        async with self._link.pipe() as pipe:
            async for item in _each(jobs):
                made, is_chosen = workshop.prepare(item)
                if full := packer.add(made, is_chosen=is_chosen):
                    for answer in await self._send(pipe, waiting, full, waits):
                        yield answer
            if rest := packer.rest():
                for answer in await self._send(pipe, waiting, rest, waits):
                    yield answer
            while waiting:
                for answer in await self._receive(pipe, waiting, waits):
                    yield answer

    async def _send(
        self, pipe: AsyncPipe | AsyncClusterPipe, waiting: deque[Chunk], chunk: Chunk, waits: Waits
    ) -> Sequence[SubmitAnswer]:
        waiting.append(chunk)
        await pipe.send(chunk.ask())
        return await self._receive(pipe, waiting, waits) if pipe.is_full else ()

    async def _receive(
        self, pipe: AsyncPipe | AsyncClusterPipe, waiting: deque[Chunk], waits: Waits
    ) -> Sequence[SubmitAnswer]:
        chunk = waiting.popleft()
        return await self._run(waits.tell(chunk, chunk.answers(await pipe.receive())))

    # ------------------------------------------------------------ follow

    def stream(
        self, job: AnyJob, offset: Place = 0, *, choice: int = 0, timeout_s: float | None = None
    ) -> AsyncIterator[StreamEvent]:
        """As `Producer.stream`."""
        reader = Reader(self._queue, JobId(str(job)), offset, choice)
        return self._events(following.stream(self._queue, reader, timeout_s))

    def stream_many(self, jobs: Iterable[AnyJob | tuple[AnyJob, Place]]) -> AsyncIterator[StreamEvent]:
        """As `Producer.stream_many`."""
        pairs = [job if isinstance(job, tuple) else (job, 0) for job in jobs]
        readers = [Reader(self._queue, JobId(str(job)), place) for job, place in pairs]
        return self._events(following.follow(self._queue, readers))

    async def result(self, job: AnyJob, timeout_s: float | None = None) -> JobResult:
        """As `Producer.result`."""
        return await self._run(commands.result(self._queue, JobId(str(job)), timeout_s))

    def results(self, jobs: Iterable[AnyJob]) -> AsyncIterator[Outcome]:
        """As `Producer.results`."""
        return self._events(outcomes(self._queue, [JobId(str(job)) for job in jobs]))

    # ------------------------------------------------------------ look and change

    async def status(self, job: AnyJob) -> JobStatus:
        """As `Producer.status`."""
        return await self._run(commands.status(self._queue, JobId(str(job))))

    async def views(self, jobs: Iterable[AnyJob]) -> list[JobView | None]:
        """As `Producer.views`."""
        return await self._run(commands.views(self._queue, [JobId(str(job)) for job in jobs]))

    async def cancel(self, job: AnyJob, *, reason: str | None = None) -> str:
        """As `Producer.cancel`."""
        [answer] = await self.cancel_many([job], reason=reason)
        return commands.known(answer, JobId(str(job)))

    async def cancel_many(self, jobs: Iterable[AnyJob], *, reason: str | None = None) -> list[str]:
        """As `Producer.cancel_many`."""
        return await self._run(commands.cancel(self._queue, [JobId(str(job)) for job in jobs], reason))

    async def requeue(self, jobs: Iterable[AnyJob]) -> list[bool]:
        """As `Producer.requeue`."""
        return await self._run(commands.requeue(self._queue, [JobId(str(job)) for job in jobs]))

    async def delete(self, jobs: Iterable[AnyJob]) -> list[bool]:
        """As `Producer.delete`."""
        return await self._run(commands.delete(self._queue, [JobId(str(job)) for job in jobs]))

    async def queue(self) -> list[QueueView]:
        """As `Producer.queue`."""
        return await self._run(commands.inspect(self._queue))

    async def queues(self) -> dict[str, int]:
        """As `Producer.queues`."""
        return await self._run(commands.queue_names())

    async def pause(self, *, is_paused: bool = True) -> None:
        """As `Producer.pause`."""
        await self._run(commands.pause(self._queue, is_paused=is_paused))

    async def purge(self, *, tenant: str | None = None) -> int:
        """As `Producer.purge`."""
        return await self._run(commands.purge(self._queue, tenant))

    async def configure(self, settings: QueueSettings) -> None:
        """As `Producer.configure`."""
        await self._run(commands.configure(self._queue, settings))

    async def batch(self, name: str) -> BatchView:
        """As `Producer.batch`."""
        return await self._run(commands.batch(self._queue, name))

    async def close_batch(self, name: str, *, callback_url: str | None = None) -> BatchView:
        """As `Producer.close_batch`."""
        return await self._run(commands.close_batch(self._queue, name, callback_url))

    async def cancel_batch(self, name: str, *, reason: str | None = None) -> BatchCancelled:
        """As `Producer.cancel_batch`."""
        return await self._run(control.cancel_batch(self._queue, name, reason))

    async def expire_batch(self, name: str, deadline: Moment) -> BatchView:
        """As `Producer.expire_batch`."""
        return await self._run(control.expire_batch(self._queue, name, deadline))

    async def dead(self, wanted: DeadFilter | None = None) -> list[JobView]:
        """As `Producer.dead`."""
        return await self._run(control.dead_jobs(self._queue, wanted or DeadFilter()))

    async def requeue_dead(self, wanted: DeadFilter) -> int:
        """As `Producer.requeue_dead`."""
        return await self._run(control.requeue_dead(self._queue, wanted))

    async def jobs(self, *, batch: str | None = None, state: str | None = None, limit: int = 100) -> "list[JobRow]":
        """As `Producer.jobs`, on a thread."""
        from producer.history import newest_jobs

        return await asyncio.to_thread(
            newest_jobs, self._database_url, queue=self._queue.name, batch=batch, state=state, limit=limit
        )

    # ------------------------------------------------------------ running

    async def _run(self, operation: commands.Operation[Result]) -> Result:
        try:
            step = next(operation)
            while True:
                try:
                    replies = await self._perform(step)
                except ProducerError as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(replies)
        except StopIteration as stop:
            return stop.value

    async def _events(self, operation: Generator[Step | Result, list[Reply], None]) -> AsyncIterator[Result]:
        """Yield what an operation yields beside its steps."""
        try:
            step = next(operation)
            while True:
                if isinstance(step, STEPS):
                    step = operation.send(await self._perform(step))
                else:
                    yield step
                    step = operation.send([])
        except StopIteration:
            return

    async def _perform(self, step: Step) -> list[Reply]:
        match step:
            case Ask():
                return await self._link.ask(step)
            case Read(cursors, block_ms) if len(cursors) == 1:
                [(channel, after)] = cursors.items()
                entries = await self._hub.read(channel, after, block_ms)
                return [(channel, entries)] if entries else []
            case Read():
                [reply] = await self._link.ask_blocking(step.ask)
                return list(channel_entries(reply))
            case Pause(seconds):
                await asyncio.sleep(seconds)
                return []


async def _each(jobs: Iterable[PromptLike | Job] | AsyncIterable[PromptLike | Job]) -> AsyncIterator[PromptLike | Job]:
    if isinstance(jobs, AsyncIterable):
        async for job in jobs:
            yield job
    else:
        for job in jobs:
            yield job
