"""The client for programs that wait: `Producer`.

    with Producer() as producer:
        job = producer.submit("Name three rivers.", max_tokens=40)
        for event in producer.stream(job):
            print(event.text, end="")

It only runs what `commands.py` and `following.py` say; `aio.py` runs the same for asyncio. Threads may share one.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

from producer import commands, config, control, embedded, following
from producer.cluster import ClusterPipe, open_link
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
from producer.jobs import Job, Moment, Options, Prepared, PromptLike, Workshop, only_prompt, template
from producer.links import LinkSettings, Pipe
from producer.outcomes import Outcome, outcomes
from producer.room import Waits, submit_within
from producer.terms import TIMEOUT_S, Terms, read

if TYPE_CHECKING:
    from producer.history import JobRow

Result = TypeVar("Result")
AnyJob = JobId | str | Receipt
"""A job: its id, or the receipt of its submit."""


class Producer:
    """Submit jobs, follow their tokens, ask for results.

    Args:
        url: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL; else SLUICE_REDIS_URL, else the
            embedded server.
        queue: Queue to speak of.
        partitions: Partitions of that queue.
        durability: Of submits that do not say it: memory, aof, fsync or replica:N; else as the queue's settings say.
        database_url: SQLAlchemy URL of the job history, for `jobs`; without one, SLUICE_DATABASE_URL or the embedded
            server's SQLite file.
        patience_s: How long to go on trying when the server is away, once it has been reached.

    Raises:
        InvalidJob: `durability` is none.
        InvalidSetting: a URL cannot be read.
        EmbeddedServerError: no URL is given, and no server can be started.
    """

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
        self._link = open_link(LinkSettings(server_url(url), patience_s))
        self._database_url = config.database_url(database_url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Producer({self._link!r}, queue={self._queue.name!r})"

    def close(self) -> None:
        """Close the connections. Jobs go on."""
        self._link.close()

    # ------------------------------------------------------------ submit

    def submit(
        self,
        prompt: PromptLike | None = None,
        *,
        messages: PromptLike | None = None,
        token_ids: Sequence[int] | None = None,
        durability: str | None = None,
        wait_s: float = 0.0,
        **options: Unpack[Options],
    ) -> Receipt:
        """Submit one job: a prompt, or chat messages, or token ids.

        After this returns, the job is not lost, as far as `durability` reaches (see docs/reliability.md).
        Where the queue is full, it waits for room for up to `wait_s`; by default not at all.

        Raises:
            InvalidJob: a value is wrong, or no worker of this queue can take the job.
            DurabilityRefused: the server cannot promise the durability asked for; nothing was submitted.
            LessDurable: the job is accepted, but the server has not confirmed that durability.
            QueueFull: the queue is at a bound; `retry_after_s` says when to try again.
            IdempotencyConflict: the key belongs to a job that asked for something else.
            QueueUnreachable, QueueRefused: the server is away, or refuses.
        """
        made = template(options, partitions=self._queue.partitions).new_job(only_prompt(prompt, messages, token_ids))
        assurance = self._run(self._terms.agree(self._queue, durability))
        is_chosen = options.get("job_id") is not None
        return self._run(
            submit_within(wait_s, lambda: commands.submit(self._queue, made, assurance, is_chosen=is_chosen))
        )

    def submit_many(
        self, jobs: Iterable[PromptLike | Job], *, durability: str | None = None, **options: Unpack[Options]
    ) -> Iterator[SubmitAnswer]:
        """Submit many jobs, pipelined; yields a Receipt or an error for each, in order.

        Args:
            jobs: Prompts, which take `options`, or `job(prompt, **options)` with options of their own on top.
            durability: As in `submit`. Disk or replicas are waited for once for up to 1024 jobs, not for each.
            options: For all of them. They are checked and encoded once.

        Raises:
            InvalidJob: `options` are wrong. A job that is wrong in itself is answered by an InvalidJob in its place.
            DurabilityRefused: as in `submit`. A job that is less durable is answered by a LessDurable in its place.
            QueueUnreachable, QueueRefused: the server is away, or refuses; submit again with the same ids.
        """
        workshop = Workshop(options, partitions=self._queue.partitions)
        return self.submit_prepared(map(workshop.prepare, jobs), durability=durability)

    def submit_prepared(self, jobs: Iterable[Prepared], *, durability: str | None = None) -> Iterator[SubmitAnswer]:
        """As `submit_many`, for jobs that are already encoded."""
        packer = Packer(self._queue, self._run(self._terms.agree(self._queue, durability)))
        with self._link.pipe() as pipe:
            waiting, waits = deque[Chunk](), Waits(self._queue)
            for made, is_chosen in jobs:
                if full := packer.add(made, is_chosen=is_chosen):
                    yield from self._send(pipe, waiting, full, waits)
            if rest := packer.rest():
                yield from self._send(pipe, waiting, rest, waits)
            while waiting:
                yield from self._receive(pipe, waiting, waits)

    def _send(
        self, pipe: Pipe | ClusterPipe, waiting: deque[Chunk], chunk: Chunk, waits: Waits
    ) -> Iterator[SubmitAnswer]:
        waiting.append(chunk)
        pipe.send(chunk.ask())
        if pipe.is_full:
            yield from self._receive(pipe, waiting, waits)

    def _receive(self, pipe: Pipe | ClusterPipe, waiting: deque[Chunk], waits: Waits) -> Sequence[SubmitAnswer]:
        chunk = waiting.popleft()
        return self._run(waits.tell(chunk, chunk.answers(pipe.receive())))

    # ------------------------------------------------------------ follow

    def stream(
        self, job: AnyJob, offset: Place = 0, *, choice: int = 0, timeout_s: float | None = None
    ) -> Iterator[StreamEvent]:
        """Yield what a job generates, from a place on, until its end; outlives lost connections and dead workers.

        Args:
            job: The job.
            offset: Tokens that the reader has, or the `cursor` of the last event it saw (which also knows the text).
            choice: Which of the job's `n` choices.
            timeout_s: How long the whole may take.

        Raises:
            JobFailed, JobCancelled, JobExpired: after the last event, where the job ended so.
            JobNotFound, BadOffset: there is no such job or place.
            ResultExpired, ChannelExpired: what follows the place is no longer kept.
            ResultTimeout: it has not ended within `timeout_s`; it goes on.
            QueueUnreachable: the server stayed away; stream again from the last event's cursor.
        """
        reader = Reader(self._queue, JobId(str(job)), offset, choice)
        return self._events(following.stream(self._queue, reader, timeout_s))

    def stream_many(self, jobs: Iterable[AnyJob | tuple[AnyJob, Place]]) -> Iterator[StreamEvent]:
        """Yield what many jobs generate, in the order it arrives, over one connection.

        A job that ends otherwise than done says so in its last event's `end`; nothing is raised for it.

        Args:
            jobs: Jobs, or (job, place) for those that are not read from the start.
        """
        pairs = [job if isinstance(job, tuple) else (job, 0) for job in jobs]
        readers = [Reader(self._queue, JobId(str(job)), place) for job, place in pairs]
        return self._events(following.follow(self._queue, readers))

    def result(self, job: AnyJob, timeout_s: float | None = None) -> JobResult:
        """Wait for a job's end and return its output.

        Raises:
            JobFailed, JobCancelled, JobExpired: it ended otherwise; `partial` has the output there is.
            ResultTimeout: it has not ended within `timeout_s`; it goes on.
            JobNotFound, ResultExpired: there is nothing, or nothing any more.
        """
        return self._run(commands.result(self._queue, JobId(str(job)), timeout_s))

    def results(self, jobs: Iterable[AnyJob], *, with_entries: bool = False) -> Iterator[Outcome]:
        """Yield the outcome of each job, as they end; nothing is raised for a job that did not get done.

        Args:
            jobs: Jobs.
            with_entries: Read each first choice's channel too, which has the time of each token.
        """
        ids = [JobId(str(job)) for job in jobs]
        return self._events(outcomes(self._queue, ids, with_entries=with_entries))

    # ------------------------------------------------------------ look and change

    def status(self, job: AnyJob) -> JobStatus:
        """State, attempt, tokens so far, jobs and tokens ahead, and when it may begin.

        Raises:
            JobNotFound: it is unknown.
        """
        return self._run(commands.status(self._queue, JobId(str(job))))

    def views(self, jobs: Iterable[AnyJob]) -> list[JobView | None]:
        """What the queue knows of each job; None for an unknown one."""
        return self._run(commands.views(self._queue, [JobId(str(job)) for job in jobs]))

    def cancel(self, job: AnyJob, *, reason: str | None = None) -> str:
        """Cancel a job; returns the state reached, or `asked` where a worker is told to stop.

        Raises:
            JobNotFound: it is unknown.
        """
        [answer] = self.cancel_many([job], reason=reason)
        return commands.known(answer, JobId(str(job)))

    def cancel_many(self, jobs: Iterable[AnyJob], *, reason: str | None = None) -> list[str]:
        """Cancel jobs: for each the state reached, `asked` or `unknown`."""
        return self._run(commands.cancel(self._queue, [JobId(str(job)) for job in jobs], reason))

    def requeue(self, jobs: Iterable[AnyJob]) -> list[bool]:
        """Send failed jobs back to the queue; they go on after the tokens they have. False: not a failed job."""
        return self._run(commands.requeue(self._queue, [JobId(str(job)) for job in jobs]))

    def delete(self, jobs: Iterable[AnyJob]) -> list[bool]:
        """Remove what the queue holds of ended jobs. False: unknown, or not ended. The history keeps its rows."""
        return self._run(commands.delete(self._queue, [JobId(str(job)) for job in jobs]))

    def queue(self) -> list[QueueView]:
        """What each partition of the queue holds now."""
        return self._run(commands.inspect(self._queue))

    def queues(self) -> dict[str, int]:
        """Every queue on this server, with its partitions. Scans the key space."""
        return self._run(commands.queue_names())

    def pause(self, *, is_paused: bool = True) -> None:
        """Stop workers from taking jobs of this queue, or let them go on. Submits are taken all the same."""
        self._run(commands.pause(self._queue, is_paused=is_paused))

    def purge(self, *, tenant: str | None = None) -> int:
        """Cancel every waiting job (of one tenant); how many."""
        return self._run(commands.purge(self._queue, tenant))

    def configure(self, settings: QueueSettings) -> None:
        """Write settings of this queue."""
        self._run(commands.configure(self._queue, settings))

    def batch(self, name: str) -> BatchView:
        """Totals of a batch as the queue counts them; an unknown one has no jobs."""
        return self._run(commands.batch(self._queue, name))

    def close_batch(self, name: str, *, callback_url: str | None = None) -> BatchView:
        """Say that a batch takes no more jobs; `callback_url` is called when all of it has ended, now if it has.

        Raises:
            BatchNotFound: it has no jobs.
        """
        return self._run(commands.close_batch(self._queue, name, callback_url))

    def cancel_batch(self, name: str, *, reason: str | None = None) -> BatchCancelled:
        """Close a batch and cancel every job of it that has not ended.

        Raises:
            BatchNotFound: it has no jobs.
        """
        return self._run(control.cancel_batch(self._queue, name, reason))

    def expire_batch(self, name: str, deadline: Moment) -> BatchView:
        """Give a batch a deadline: when it passes, the batch is closed, and jobs of it that have not ended expire.

        Raises:
            BatchNotFound: it has no jobs.
        """
        return self._run(control.expire_batch(self._queue, name, deadline))

    def dead(self, wanted: DeadFilter | None = None) -> list[JobView]:
        """Failed jobs that are kept whole, the one that failed first first."""
        return self._run(control.dead_jobs(self._queue, wanted or DeadFilter()))

    def requeue_dead(self, wanted: DeadFilter) -> int:
        """Send the dead jobs that are meant back to the queue, as `requeue` does; how many went."""
        return self._run(control.requeue_dead(self._queue, wanted))

    def jobs(self, *, batch: str | None = None, state: str | None = None, limit: int = 100) -> "list[JobRow]":
        """The newest jobs of this queue in the history.

        Raises:
            HistoryUnavailable: there is no history at the database URL.
        """
        from producer.history import newest_jobs

        return newest_jobs(self._database_url, queue=self._queue.name, batch=batch, state=state, limit=limit)

    # ------------------------------------------------------------ running

    def _run(self, operation: commands.Operation[Result]) -> Result:
        try:
            step = next(operation)
            while True:
                try:
                    replies = self._perform(step)
                except ProducerError as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(replies)
        except StopIteration as stop:
            return stop.value

    def _events(self, operation: Generator[Step | Result, list[Reply], None]) -> Iterator[Result]:
        """Yield what an operation yields beside its steps."""
        try:
            step = next(operation)
            while True:
                if isinstance(step, STEPS):
                    step = operation.send(self._perform(step))
                else:
                    yield step
                    step = operation.send([])
        except StopIteration:
            return

    def _perform(self, step: Step) -> list[Reply]:
        match step:
            case Ask():
                return self._link.ask(step)
            case Read():
                [reply] = self._link.ask(step.ask)
                return list(channel_entries(reply))
            case Pause(seconds):
                time.sleep(seconds)
                return []


def terms_of(durability: str | None, patience_s: float) -> Terms:
    """What a client asks for where its calls do not say.

    Raises:
        InvalidJob: `durability` is none.
    """
    return Terms(None if durability is None else read(durability), min(patience_s, TIMEOUT_S))


def server_url(argument: str | None) -> str:
    """The server's URL: the argument, the environment, or the embedded server's, which is started where needed."""
    return config.redis_url(argument) or embedded.ensure(config.state_dir()).url
