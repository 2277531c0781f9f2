"""`AsyncProducer`, the asyncio client. It has the same operations as `Producer`, as coroutines.

    async with AsyncProducer() as producer:
        job = await producer.submit("Name three rivers.", max_tokens=40)
        async for event in producer.stream(job):
            print(event.text, end="")

It only runs the generators of `operations/`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

from sluice.producer import config
from sluice.producer.client import (
    AnyJob,
    check_options,
    durability_policy,
    embedded_use,
    job_ids,
    link_settings,
    listed,
    readers_of,
)
from sluice.producer.errors import ProducerError
from sluice.producer.operations import batches, control, dead, results, submission, views
from sluice.producer.operations import follow as following
from sluice.producer.operations.backpressure import submit_estimated, submit_within
from sluice.producer.operations.batches import BatchCancelled
from sluice.producer.operations.dead import DeadFilter
from sluice.producer.operations.follow import Place, Reader, StreamEvent, choice_readers
from sluice.producer.operations.operation import STEPS, Operation, Reply, Step, first_ask
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.results import Outcome, outcomes
from sluice.producer.operations.submission import Packer, Receipt, SubmitAnswer
from sluice.producer.operations.views import JobStatus
from sluice.producer.transport.links import AsyncLink, AsyncPipe
from sluice.protocol.calls import BatchView, JobView, QueueSettings, QueueView
from sluice.protocol.jobs import Job, JobEncoder, Moment, Options, PromptLike, only_prompt
from sluice.protocol.redis.drivers import drive_events_async
from sluice.protocol.waits import OnWait, WaitNotifier
from sluice.protocol.wire import JobId, JobResult

if TYPE_CHECKING:
    from sluice.history.queries import JobRow

Result = TypeVar("Result")


class AsyncProducer:
    """Client for event loops: submit jobs, follow their tokens, wait for results. See `Producer`.

    Each loop that uses it has connections of its own, which close when the loop shuts down or calls `close`.
    """

    def __init__(  # noqa: PLR0913  # each is a setting of the client, given by its name
        self,
        url: str | None = None,
        *,
        queue: str = "default",
        partitions: int | None = None,
        durability: str | None = None,
        database_url: str | None = None,
        patience_s: float = 30.0,
        on_wait: OnWait | None = None,
    ) -> None:
        self.waits = WaitNotifier(on_wait)
        self._queue = Queue(queue, partitions)
        self._durability = durability_policy(durability, patience_s)
        self._use = embedded_use(url, self.waits)
        self._link = AsyncLink(link_settings(url, self._use, patience_s, self.waits))
        self._database_url = config.database_url(database_url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncProducer({self._link!r}, queue={self._queue.name!r})"

    @property
    def target(self) -> Queue:
        """Its queue."""
        return self._queue

    async def close(self) -> None:
        """Close the connections; other loops close theirs. Jobs continue.

        The last user of the embedded server stops it.
        """
        await self._link.close()
        if self._use is not None:
            await asyncio.to_thread(self._use.close)

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
        """Do as `Producer.submit`."""
        only = only_prompt(prompt, messages, token_ids)
        made, durability_check = await self._link.run(
            submission.prepare(self._queue, self._durability, only, durability, options)
        )
        is_chosen = options.get("job_id") is not None
        return await self._link.run(
            submit_within(
                wait_s,
                lambda: submission.submit(self._queue, made, durability_check, is_chosen=is_chosen),
                self.waits,
            )
        )

    def submit_many(
        self,
        jobs: Iterable[PromptLike | Job] | AsyncIterable[PromptLike | Job],
        *,
        durability: str | None = None,
        **options: Unpack[Options],
    ) -> AsyncIterator[SubmitAnswer]:
        """Do as `Producer.submit_many`, as lazily; the jobs may come from an asynchronous iterator."""
        check_options(options, durability)
        return self._submit_many(listed(jobs), durability, options)

    async def _submit_many(
        self,
        jobs: Iterable[PromptLike | Job] | AsyncIterable[PromptLike | Job],
        durability: str | None,
        options: Options,
    ) -> AsyncIterator[SubmitAnswer]:
        await self._link.run(self._queue.read())
        encoder = JobEncoder(options, partitions=self._queue.partitions)
        durability_check = await self._link.run(self._durability.resolve(self._queue, durability))
        packer = Packer(durability_check)
        in_flight = deque[Operation[list[SubmitAnswer]]]()
        async with self._link.pipe() as pipe:
            async for item in _each(jobs):
                if full := packer.add(encoder.prepare(item)):
                    for answer in await self._send(
                        pipe, in_flight, submit_estimated(self._queue, full, durability_check)
                    ):
                        yield answer
            if rest := packer.rest():
                for answer in await self._send(pipe, in_flight, submit_estimated(self._queue, rest, durability_check)):
                    yield answer
            while in_flight:
                for answer in await self._receive(pipe, in_flight):
                    yield answer

    async def _send(
        self, pipe: AsyncPipe, in_flight: deque[Operation[list[SubmitAnswer]]], operation: Operation[list[SubmitAnswer]]
    ) -> Sequence[SubmitAnswer]:
        in_flight.append(operation)
        await pipe.send(first_ask(operation))
        return await self._receive(pipe, in_flight) if pipe.is_full else ()

    async def _receive(
        self, pipe: AsyncPipe, in_flight: deque[Operation[list[SubmitAnswer]]]
    ) -> Sequence[SubmitAnswer]:
        return await self._link.run(in_flight.popleft(), await pipe.receive())

    # ------------------------------------------------------------ follow

    def stream(
        self, job: AnyJob, offset: Place = 0, *, choice: int = 0, timeout_s: float | None = None
    ) -> AsyncIterator[StreamEvent]:
        """Do as `Producer.stream`."""
        reader = Reader(self._queue, JobId(str(job)), offset, choice)
        return self._events(following.stream(self._queue, [reader], timeout_s, waits=self.waits))

    def stream_choices(
        self, job: AnyJob, num_choices: int, places: Sequence[Place] | None = None
    ) -> AsyncIterator[StreamEvent]:
        """Do as `Producer.stream_choices`."""
        readers = choice_readers(self._queue, JobId(str(job)), num_choices, places)
        return self._events(following.stream(self._queue, readers, waits=self.waits))

    def stream_groups(self, job: AnyJob, num_choices: int) -> AsyncIterator[Sequence[StreamEvent]]:
        """Yield what `stream_choices` yields, in groups of what arrived at once."""
        readers = choice_readers(self._queue, JobId(str(job)), num_choices)
        return self._groups(following.stream(self._queue, readers, waits=self.waits))

    def stream_many(self, jobs: Iterable[AnyJob | tuple[AnyJob, Place]]) -> AsyncIterator[StreamEvent]:
        """Do as `Producer.stream_many`."""
        return self._events(following.follow(self._queue, readers_of(self._queue, jobs), waits=self.waits))

    async def result(self, job: AnyJob, timeout_s: float | None = None) -> JobResult:
        """Do as `Producer.result`."""
        return await self._link.run(results.result(self._queue, JobId(str(job)), timeout_s, waits=self.waits))

    def results(
        self, jobs: Iterable[AnyJob], *, with_entries: bool = False, is_waiting: bool = True
    ) -> AsyncIterator[Outcome]:
        """Do as `Producer.results`."""
        read = outcomes(self._queue, job_ids(jobs), with_entries=with_entries, is_waiting=is_waiting, waits=self.waits)
        return self._events(read)

    # ------------------------------------------------------------ look and change

    async def status(self, job: AnyJob) -> JobStatus:
        """Do as `Producer.status`."""
        return await self._link.run(views.status(self._queue, JobId(str(job))))

    async def views(self, jobs: Iterable[AnyJob]) -> list[JobView | None]:
        """Do as `Producer.views`."""
        return await self._link.run(views.views(self._queue, job_ids(jobs)))

    async def cancel(self, job: AnyJob, *, reason: str | None = None) -> str:
        """Do as `Producer.cancel`."""
        [answer] = await self.cancel_many([job], reason=reason)
        return control.known(answer, JobId(str(job)))

    async def cancel_many(self, jobs: Iterable[AnyJob], *, reason: str | None = None) -> list[str]:
        """Do as `Producer.cancel_many`."""
        return await self._link.run(control.cancel(self._queue, job_ids(jobs), reason))

    async def requeue(self, jobs: Iterable[AnyJob]) -> list[bool]:
        """Do as `Producer.requeue`."""
        return await self._link.run(control.requeue(self._queue, job_ids(jobs)))

    async def delete(self, jobs: Iterable[AnyJob]) -> list[bool]:
        """Do as `Producer.delete`."""
        return await self._link.run(control.delete(self._queue, job_ids(jobs)))

    async def queue(self) -> list[QueueView]:
        """Do as `Producer.queue`."""
        return await self._link.run(views.inspect(self._queue))

    async def queues(self) -> dict[str, int]:
        """Do as `Producer.queues`."""
        return await self._link.run(views.queue_names())

    async def pause(self, *, is_paused: bool = True) -> None:
        """Do as `Producer.pause`."""
        await self._link.run(control.pause(self._queue, is_paused=is_paused))

    async def purge(self, *, tenant: str | None = None) -> int:
        """Do as `Producer.purge`."""
        return await self._link.run(control.purge(self._queue, tenant))

    async def configure(self, settings: QueueSettings) -> None:
        """Do as `Producer.configure`."""
        await self._link.run(control.configure(self._queue, settings))

    async def batch(self, name: str) -> BatchView:
        """Do as `Producer.batch`."""
        return await self._link.run(batches.batch(self._queue, name))

    async def close_batch(self, name: str, *, callback_url: str | None = None) -> BatchView:
        """Do as `Producer.close_batch`."""
        return await self._link.run(batches.close_batch(self._queue, name, callback_url))

    async def cancel_batch(self, name: str, *, reason: str | None = None) -> BatchCancelled:
        """Do as `Producer.cancel_batch`."""
        return await self._link.run(batches.cancel_batch(self._queue, name, reason))

    async def expire_batch(self, name: str, deadline: Moment, *, is_new: bool = False) -> BatchView:
        """Do as `Producer.expire_batch`."""
        return await self._link.run(batches.expire_batch(self._queue, name, deadline, is_new=is_new))

    async def dead(self, wanted: DeadFilter | None = None) -> list[JobView]:
        """Do as `Producer.dead`."""
        return await self._link.run(dead.dead_jobs(self._queue, wanted or DeadFilter()))

    async def requeue_dead(self, wanted: DeadFilter) -> int:
        """Do as `Producer.requeue_dead`."""
        return await self._link.run(dead.requeue_dead(self._queue, wanted))

    async def jobs(self, *, batch: str | None = None, state: str | None = None, limit: int = 100) -> "list[JobRow]":
        """Do as `Producer.jobs`, on a thread."""
        from sluice.history.queries import newest_jobs

        return await asyncio.to_thread(
            newest_jobs, self._database_url, queue=self._queue.name, batch=batch, state=state, limit=limit
        )

    # ------------------------------------------------------------ running

    async def run(self, operation: Operation[Result]) -> Result:
        """Run an operation of the steps of `sluice.producer.operations.operation` on the connections of this client."""
        return await self._link.run(operation)

    async def _events(self, operation: Generator[Step | Result, list[Reply], None]) -> AsyncIterator[Result]:
        """Run an operation and yield its events."""
        async with aclosing(drive_events_async(operation, self._link.perform, STEPS)) as events:
            async for event in events:
                if event is not None:
                    yield event

    async def _groups(self, operation: Generator[Step | Result, list[Reply], None]) -> AsyncIterator[Sequence[Result]]:
        """Run an operation, and yield its events between two steps together."""
        group: list[Result] = []
        try:
            async with aclosing(drive_events_async(operation, self._link.perform, STEPS)) as events:
                async for event in events:
                    if event is not None:
                        group.append(event)
                    elif group:
                        yield group
                        group = []
        except ProducerError:
            if group:
                yield group
            raise
        if group:
            yield group


async def _each(jobs: Iterable[PromptLike | Job] | AsyncIterable[PromptLike | Job]) -> AsyncIterator[PromptLike | Job]:
    if isinstance(jobs, AsyncIterable):
        async for job in jobs:
            yield job
    else:
        for job in jobs:
            yield job
