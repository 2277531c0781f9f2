# Generated from producer/aio.py by `python -m tools.blocking`: change that file.

"""The client of a queue, which runs the generators of `operations/`. `aio.py` is for asyncio, `client.py` blocks.

    with Producer() as producer:
        job = producer.submit("Name three rivers.", max_tokens=40)
        for event in producer.stream(job):
            print(event.text, end="")

A client is thread-safe, and event loops may share it: each loop has its own connections, which are closed when the loop
shuts down or calls `close`.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar, Unpack

from sluice.producer import config
from sluice.producer.arguments import (
    AnyJob,
    after_of,
    check_options,
    checked_texts,
    durability_policy,
    embedded_use,
    job_ids,
    link_settings,
    listed,
    readers_of,
    scheduled_jobs,
)
from sluice.producer.errors import ProducerError
from sluice.producer.operations import batches, chains, control, dead, results, schedules, submission, views
from sluice.producer.operations import follow as following
from sluice.producer.operations.backpressure import submit_estimated, submit_within
from sluice.producer.operations.batches import BatchCancelled
from sluice.producer.operations.chains import ChainView
from sluice.producer.operations.dead import DeadFilter
from sluice.producer.operations.follow import Place, Reader, StreamEvent, choice_readers
from sluice.producer.operations.operation import Operation, Reply, Step
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.results import Outcome, outcomes, vector_of
from sluice.producer.operations.schedules import NUM_NEXT, ScheduleView
from sluice.producer.operations.submission import JobPacker, Receipt, SubmitAnswer, receipt_of
from sluice.producer.operations.views import JobStatus
from sluice.producer.transport.links import Link
from sluice.protocol.calls import BatchView, JobView, QueueSettings, QueueView
from sluice.protocol.chains.chain import After
from sluice.protocol.chains.releasing import ChainLook
from sluice.protocol.durability import NOTHING_ASKED
from sluice.protocol.jobs import (
    CheckedJob,
    Job,
    JobEncoder,
    Moment,
    Options,
    Prepared,
    PromptLike,
    checked_job,
    only_prompt,
)
from sluice.protocol.schedules.firing import Look
from sluice.protocol.schedules.schedule import Misfire, Overlap, Schedule
from sluice.protocol.waits import OnWait, WaitNotifier
from sluice.protocol.wire import JobId, JobResult

if TYPE_CHECKING:
    from sluice.history.queries import JobRow

Result = TypeVar("Result")
Item = TypeVar("Item")
Many: TypeAlias = Iterable[Item]
"""Items, which may be produced lazily."""


class Producer:
    """Client of one queue: submit jobs, follow their tokens, wait for results.

    Args:
        url: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL. Default: SLUICE_REDIS_URL, else
            the embedded server, which is started if needed.
        queue: Name of the queue.
        partitions: Number of partitions of the queue, which must equal that of its workers. Default: theirs, or 1 while
            no worker has served the queue.
        durability: Durability of submits: memory, aof, fsync or replica:N. Default: that of the queue's settings.
        database_url: SQLAlchemy URL of the job history, for `jobs`. Default: SLUICE_DATABASE_URL, else the SQLite file
            of the embedded server.
        patience_s: How long to retry while the server is unreachable, after the first successful connection. A server
            that is silent is given up after 15 s; on asyncio, after twice `patience_s` and 1 s if that is less.
        on_wait: Receives a `WaitNotice` when a call has waited for 2 s (for a worker, a server, room in the queue, a
            turn), and another when that wait ends. It must return quickly.

    Raises:
        InvalidJob: `durability` is not one.
        InvalidSetting: a URL cannot be read.
        EmbeddedServerError: no URL is given, and no server can be started.
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
        self._link = Link(link_settings(url, self._use, patience_s, self.waits))
        self._database_url = config.database_url(database_url)
        self._schedule_watch = schedules.watch_of(self._queue)
        self._chain_watch = chains.watch_of(self._queue)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Producer({self._link!r}, queue={self._queue.name!r})"

    @property
    def target(self) -> Queue:
        """The queue of this client."""
        return self._queue

    def close(self) -> None:
        """Close the connections; jobs continue. The last user of the embedded server stops it.

        On asyncio, other event loops close their own connections.
        """
        self._link.close()
        if self._use is not None:
            self._use.close()

    # ------------------------------------------------------------ submit

    def submit(
        self,
        prompt: PromptLike | None = None,
        *,
        messages: PromptLike | None = None,
        token_ids: Sequence[int] | None = None,
        after: Iterable[AnyJob] | After | None = None,
        durability: str | None = None,
        wait_s: float = 0.0,
        **options: Unpack[Options],
    ) -> Receipt:
        """Submit one job: a prompt, or chat messages, or token ids.

        After this returns, the job is kept to the extent of `durability` (see docs/explanation/durability.md).
        If the queue is full, it waits up to `wait_s` for room. A worker checks what only it knows: the model's name,
        and the length of the prompt in tokens. A job that fails there raises JobFailed when you read it.

        Args:
            prompt: Text, or one of the next two.
            messages: Chat messages.
            token_ids: Token ids.
            after: Jobs that must be done before this one may start, else it is cancelled; or `after(…)` with another
                rule. In the prompt, or the contents of messages, `{{outputs[0]}}` becomes the text of the first one.
            durability: What the server must confirm.
            wait_s: Longest wait for room.
            options: Options of the job.

        Raises:
            InvalidJob: a value is wrong, or needs a feature that the queue's workers lack. JobTooLarge: the job is too
                large.
            DurabilityRefused: the server cannot guarantee the requested durability; nothing was submitted.
            LessDurable: the job is accepted, but the server has not confirmed that durability.
            QueueFull: the queue is at a limit; `retry_after_s` estimates when it has room.
            IdempotencyConflict: the key belongs to a job with another prompt or options.
            QueueUnreachable, QueueRefused: the server is unreachable, or refuses.
        """
        job = checked_job(only_prompt(prompt, messages, token_ids), options)
        return self.submit_checked(job, after=after_of(after), durability=durability, wait_s=wait_s)

    def submit_checked(
        self, job: CheckedJob, *, after: After | None = None, durability: str | None = None, wait_s: float = 0.0
    ) -> Receipt:
        """Submit a job that is already checked, as `submit` does."""
        prepared, durability_check = self._link.run(submission.prepare(self._queue, self._durability, job, durability))

        def attempt() -> Operation[Receipt]:
            if after is None:
                return submission.submit(self._queue, prepared, durability_check, is_chosen=job.is_chosen)
            return chains.submit_after(self._queue, prepared, after, durability_check, is_chosen=job.is_chosen)

        return self._link.run(submit_within(wait_s, attempt, self.waits))

    def submit_many(
        self,
        jobs: Many[PromptLike | Job],
        *,
        after: Iterable[AnyJob] | After | None = None,
        durability: str | None = None,
        **options: Unpack[Options],
    ) -> Iterator[SubmitAnswer]:
        """Submit many jobs, pipelined; yields a Receipt or an error for each, in order.

        Lazy: nothing is sent until you iterate. Only `options` and `durability` are checked at the call.

        Args:
            jobs: Prompts, or `job(prompt, **options)` for a prompt with additional options. On asyncio, they may come
                from an asynchronous iterator.
            after: What each of them waits for, as in `submit`.
            durability: As in `submit`. One wait for disk or replicas covers up to 1024 jobs.
            options: Options of every job, checked and encoded once.

        Raises:
            InvalidJob: an option or `durability` is wrong, or `jobs` is a single job. For a wrong job in a list, an
                InvalidJob is yielded instead.
            DurabilityRefused: as in `submit`. For a single less durable job, a LessDurable is yielded instead.
            QueueUnreachable, QueueRefused: the server is unreachable, or refuses; submit again with the same ids.
        """
        check_options(options, durability)
        return self._submit_many(listed(jobs), after_of(after), durability, options)

    def _submit_many(
        self, jobs: Many[PromptLike | Job], after: After | None, durability: str | None, options: Options
    ) -> Iterator[SubmitAnswer]:
        self._link.run(self._queue.read())
        encoder = JobEncoder(options, partitions=self._queue.partitions)
        prepared = (encoder.prepare(job) for job in _each(jobs))
        with closing(self.submit_prepared(prepared, after=after, durability=durability)) as answers:
            yield from answers

    def submit_prepared(
        self, jobs: Many[Prepared], *, after: After | None = None, durability: str | None = None
    ) -> Generator[SubmitAnswer]:
        """Submit jobs that are already encoded, as `submit_many` does. Lazy, too."""
        durability_check = self._link.run(self._durability.resolve(self._queue, durability))
        packed = _packed(jobs, JobPacker(NOTHING_ASKED if after else durability_check))

        def submit(group: Sequence[Prepared]) -> Operation[list[SubmitAnswer]]:
            if after is None:
                return submit_estimated(self._queue, group, durability_check)
            return chains.submit_all_after(self._queue, group, after, durability_check)

        operations = (submit(group) for group in packed)
        with closing(self._link.run_ahead(operations)) as groups:
            for answers in groups:
                yield from answers

    def embed(self, texts: Iterable[PromptLike], **options: Unpack[Options]) -> list[list[float]]:
        """Embed texts, each of which is a job; return their vectors in the order of the texts.

        All or nothing: nothing is submitted if a text is wrong, and the first error cancels the other jobs. To get the
        vectors of the others, use `submit_many` and `results`.

        Args:
            texts: Texts or lists of token ids.
            options: Options of every job, such as `dimensions` or `model`.

        Raises:
            InvalidJob: a text or an option is wrong, or the queue's workers have no embeddings. If there are several
                texts, its message begins with `texts[NUMBER]`.
            JobFailed, JobCancelled, JobExpired, ResultExpired, JobNotFound: a job ended otherwise.
            QueueFull, QueueUnreachable, QueueRefused: as in `submit`.
        """
        prompts = checked_texts(texts)
        receipts: list[Receipt] = []
        try:
            answers = list(self.submit_many(prompts, **{**options, "embed": True}))
            # Another caller may wait for a job that was there already.
            receipts += [answer for answer in answers if isinstance(answer, Receipt) and not answer.is_duplicate]
            accepted = list(map(receipt_of, answers))
            vectors = {outcome.job_id: vector_of(outcome) for outcome in self.results(accepted)}
        except ProducerError:
            with suppress(ProducerError):
                self.cancel_many(receipts, reason="another text of the call has no vector")
            raise
        return [vectors[receipt.id] for receipt in accepted]

    # ------------------------------------------------------------ follow

    def stream(
        self, job: AnyJob, offset: Place = 0, *, choice: int = 0, timeout_s: float | None = None
    ) -> Iterator[StreamEvent]:
        """Yield the output of a job after a position, until its end. Survives lost connections and dead workers.

        Args:
            job: The job.
            offset: The `cursor` of your last event, which resumes exactly after it; or the number of tokens that you
                have. A number within an event begins with that whole event, whose `start` is before it.
            choice: Index of the choice, from 0 to `n` - 1.
            timeout_s: Longest time until the end, even while the server is unreachable.

        Raises:
            JobFailed, JobCancelled, JobExpired: the job ended so; raised after the last event.
            JobNotFound, BadOffset: the job or the position does not exist.
            ResultExpired, ChannelExpired: the output after the position has expired.
            ResultTimeout: the job has not ended within `timeout_s`; it continues.
            QueueUnreachable: the server stayed unreachable; stream again from the cursor of the last event.
        """
        reader = Reader(self._queue, JobId(str(job)), offset, choice)
        return self._events(following.stream(self._queue, [reader], timeout_s, waits=self.waits))

    def stream_choices(
        self, job: AnyJob, num_choices: int, places: Sequence[Place] | None = None
    ) -> Iterator[StreamEvent]:
        """Yield the output of all choices of a job in the order of arrival, over one connection.

        Args:
            job: The job.
            num_choices: The `n` that it was submitted with.
            places: Where to begin in each choice. Default: at the first token.

        Raises:
            JobFailed, JobCancelled, JobExpired: the job ended so; raised after the last event.
            JobNotFound, ResultExpired, ChannelExpired, QueueUnreachable: as in `stream`.
        """
        readers = choice_readers(self._queue, JobId(str(job)), num_choices, places)
        return self._events(following.stream(self._queue, readers, waits=self.waits))

    def stream_groups(self, job: AnyJob, num_choices: int) -> Iterator[Sequence[StreamEvent]]:
        """Yield the events of `stream_choices`, in groups that arrived together."""
        readers = choice_readers(self._queue, JobId(str(job)), num_choices)
        return self._link.groups(following.stream(self._queue, readers, waits=self.waits))

    def stream_many(self, jobs: Iterable[AnyJob | tuple[AnyJob, Place]]) -> Iterator[StreamEvent]:
        """Yield the output of many jobs in the order of arrival, over one connection.

        A job that does not end as done does not raise: the `end` of its last event has the state.

        Args:
            jobs: Jobs, each once, or (job, position) for a job that is not read from the start.

        Raises:
            InvalidJob: a job is given twice.
        """
        return self._events(following.follow(self._queue, readers_of(self._queue, jobs), waits=self.waits))

    def result(self, job: AnyJob, timeout_s: float | None = None) -> JobResult:
        """Wait for a job to end and return its output.

        Raises:
            JobFailed, JobCancelled, JobExpired: the job ended otherwise; `partial` has its output so far.
            ResultTimeout: the job has not ended within `timeout_s`, or the server is unreachable; the job continues.
            JobNotFound: the job is unknown.
            ResultExpired: the job is done, but its output has expired.
        """
        return self._link.run(results.result(self._queue, JobId(str(job)), timeout_s, waits=self.waits))

    def results(
        self, jobs: Iterable[AnyJob], *, with_entries: bool = False, is_waiting: bool = True
    ) -> Iterator[Outcome]:
        """Yield the outcome of each job as it ends; a job that does not end as done does not raise.

        Args:
            jobs: Jobs.
            with_entries: Whether to read also the channel of each first choice, which has the time of each token.
            is_waiting: False yields the outcomes of the jobs that have ended, and omits the others.
        """
        read = outcomes(self._queue, job_ids(jobs), with_entries=with_entries, is_waiting=is_waiting, waits=self.waits)
        return self._events(read)

    # ------------------------------------------------------------ inspection and control

    def status(self, job: AnyJob) -> JobStatus:
        """Return the state of a job: attempt, tokens so far, jobs and tokens ahead, and an estimate of its start.

        Raises:
            JobNotFound: the job is unknown.
        """
        return self._link.run(views.status(self._queue, JobId(str(job))))

    def views(self, jobs: Iterable[AnyJob]) -> list[JobView | None]:
        """Return the state of each job; None for an unknown job."""
        return self._link.run(views.views(self._queue, job_ids(jobs)))

    def cancel(self, job: AnyJob, *, reason: str | None = None) -> str:
        """Cancel a job; returns the state reached, or `asked` for a running job, which its worker then stops.

        Raises:
            JobNotFound: the job is unknown.
        """
        [answer] = self.cancel_many([job], reason=reason)
        return control.known(answer, JobId(str(job)))

    def cancel_many(self, jobs: Iterable[AnyJob], *, reason: str | None = None) -> list[str]:
        """Cancel jobs; returns for each the state reached, `asked` or `unknown`."""
        return self._link.run(control.cancel(self._queue, job_ids(jobs), reason))

    def requeue(self, jobs: Iterable[AnyJob]) -> list[bool]:
        """Requeue failed jobs, which resume after their last token.

        Returns False for a job that has not failed, whose prompt has expired, or whose idempotency key a newer job has.
        """
        return self._link.run(control.requeue(self._queue, job_ids(jobs)))

    def delete(self, jobs: Iterable[AnyJob]) -> list[bool]:
        """Delete the data of ended jobs in the queue, not in the history; False for an unknown or unfinished job."""
        return self._link.run(control.delete(self._queue, job_ids(jobs)))

    def queue(self) -> list[QueueView]:
        """Return the state of each partition of the queue."""
        return self._link.run(views.inspect(self._queue))

    def queues(self) -> dict[str, int]:
        """Return every queue on this server and its number of partitions. Scans the key space."""
        return self._link.run(views.queue_names())

    def pause(self, *, is_paused: bool = True) -> None:
        """Pause or resume the queue. While paused, workers take no jobs, and submits are still accepted."""
        self._link.run(control.pause(self._queue, is_paused=is_paused))

    def purge(self, *, tenant: str | None = None) -> int:
        """Cancel every waiting job (of one tenant); returns how many."""
        return self._link.run(control.purge(self._queue, tenant))

    def configure(self, settings: QueueSettings) -> None:
        """Write settings of this queue. Settings that are None stay unchanged."""
        self._link.run(control.configure(self._queue, settings))

    def batch(self, name: str) -> BatchView:
        """Return the totals of a batch. An unknown batch has no jobs."""
        return self._link.run(batches.batch(self._queue, name))

    def close_batch(self, name: str, *, callback_url: str | None = None) -> BatchView:
        """Close a batch: it accepts no more jobs, and `callback_url` is called when all of them have ended.

        Raises:
            BatchNotFound: the batch has no jobs.
        """
        return self._link.run(batches.close_batch(self._queue, name, callback_url))

    def cancel_batch(self, name: str, *, reason: str | None = None) -> BatchCancelled:
        """Close a batch and cancel every unfinished job in it.

        Raises:
            BatchNotFound: the batch has no jobs.
        """
        return self._link.run(batches.cancel_batch(self._queue, name, reason))

    def expire_batch(self, name: str, deadline: Moment, *, is_new: bool = False) -> BatchView:
        """Set the deadline of a batch. When it passes, the batch is closed and its unfinished jobs expire.

        Args:
            name: The batch.
            deadline: When it expires.
            is_new: Whether the batch may have no jobs yet. A deadline that is set before the first job holds for all.

        Raises:
            BatchNotFound: the batch has no jobs, and is not new.
        """
        return self._link.run(batches.expire_batch(self._queue, name, deadline, is_new=is_new))

    # ------------------------------------------------------------ schedules

    def add_schedule(
        self,
        name: str,
        jobs: Iterable[PromptLike | Job],
        *,
        cron: str,
        tz: str = "UTC",
        misfire: Misfire = "latest",
        overlap: Overlap = "allow",
        **options: Unpack[Options],
    ) -> ScheduleView:
        """Submit jobs at the times of a cron rule, once each: add a schedule, or replace the one of this name.

        Workers of the queue fire it. Adding the same rule again changes nothing but the jobs, so a program may do it at
        each start.

        Args:
            name: Its name, unique within the tenant: 1 to 40 letters, digits, `_` and `-`.
            jobs: The jobs of a run: prompts, or `job(prompt, **options)`.
            cron: Minute, hour, day, month and weekday, or a name such as `@daily`.
            tz: Time zone of the rule.
            misfire: What to do about times that nobody fired, such as during an outage: `latest` runs the newest, `all`
                the newest 100, `skip` none.
            overlap: `skip` leaves a run out while a job of the last one waits or runs.
            options: Options of every job. `deadline` and `not_before` are durations, from each run.

        Raises:
            InvalidSchedule: the name, the rule, the zone or a choice is wrong.
            InvalidJob: a job is wrong, or cannot be submitted more than once.
            InvalidSetting: croniter is not installed.
            QueueRefused: the queue has 1000 schedules.
        """
        tenant = options.get("tenant", "default")
        schedule = Schedule(name=name, tenant=tenant, cron=cron, zone=tz, misfire=misfire, overlap=overlap)
        kept = self._link.run(schedules.add(self._queue, schedule, scheduled_jobs(jobs, options)))
        return kept.view()

    def schedules(self, *, tenant: str | None = None, num_next: int = 1) -> list[ScheduleView]:
        """Return the schedules of the queue (of one tenant), each with its next runs."""
        found = self._link.run(schedules.find_all(self._queue, tenant=tenant))
        return schedules.views(found, num_next)

    def schedule(self, name: str, *, tenant: str = "default", num_next: int = NUM_NEXT) -> ScheduleView:
        """Return one schedule, with its next runs.

        Raises:
            ScheduleNotFound: there is none of this name.
        """
        kept = self._link.run(schedules.find(self._queue, name, tenant))
        return kept.view(num_next)

    def pause_schedule(self, name: str, *, tenant: str = "default", is_paused: bool = True) -> None:
        """Pause or resume a schedule. The times of a pause do not run, also not later.

        Raises:
            ScheduleNotFound: there is none of this name.
        """
        self._link.run(schedules.pause(self._queue, name, tenant, is_paused=is_paused))

    def remove_schedule(self, name: str, *, tenant: str = "default") -> None:
        """Remove a schedule. Jobs that it has submitted continue.

        Raises:
            ScheduleNotFound: there is none of this name.
        """
        self._link.run(schedules.remove(self._queue, name, tenant))

    def fire_schedules(self) -> Look:
        """Submit the runs that are due now. Only a queue without workers needs this: they do it once a second."""
        return self._link.run(schedules.fire(self._schedule_watch))

    # ------------------------------------------------------------ chains

    def chains(self, *, tenant: str | None = None, limit: int = 1000) -> list[ChainView]:
        """Return the blocked jobs of the queue (of one tenant) by submit, and what they wait for, by age.

        Of more than `limit`, it returns any, not the oldest.
        """
        return self._link.run(chains.chains(self._queue, tenant=tenant, limit=limit))

    def cancel_chain(self, chain_id: str, *, reason: str | None = None) -> dict[JobId, str]:
        """Cancel the jobs of a chain, blocked or released; returns for each what `cancel_many` does.

        Raises:
            ChainNotFound: none of its jobs is blocked.
        """
        return self._link.run(control.cancel_chain(self._queue, chain_id, reason))

    def release_chains(self) -> ChainLook:
        """Release blocked jobs whose wait is over. Only a queue without workers needs this: they do it all the time.

        A call looks at up to 256 jobs for which others wait, and the next one at the following.
        """
        return self._link.run(chains.release(self._chain_watch))

    def dead(self, selection: DeadFilter | None = None) -> list[JobView]:
        """Return the jobs of the dead set, oldest failure first."""
        return self._link.run(dead.dead_jobs(self._queue, selection or DeadFilter()))

    def requeue_dead(self, selection: DeadFilter) -> int:
        """Requeue the selected dead jobs, as `requeue` does; returns how many."""
        return self._link.run(dead.requeue_dead(self._queue, selection))

    def jobs(self, *, batch: str | None = None, state: str | None = None, limit: int = 100) -> "list[JobRow]":
        """Return the newest jobs of this queue from the history.

        Raises:
            HistoryUnavailable: there is no history at the database URL.
        """
        from sluice.history.queries import newest_jobs

        return newest_jobs(self._database_url, queue=self._queue.name, batch=batch, state=state, limit=limit)

    # ------------------------------------------------------------ operations

    def run(self, operation: Operation[Result]) -> Result:
        """Run an operation (see `sluice.producer.operations.operation`) on the connections of this client."""
        return self._link.run(operation)

    def _events(self, operation: Generator[Step | Result, list[Reply], None]) -> Iterator[Result]:
        """Run an operation and yield its events."""
        with closing(self._link.groups(operation)) as groups:
            for events in groups:
                yield from events


def _packed(jobs: Many[Prepared], packer: JobPacker) -> Iterator[Sequence[Prepared]]:
    """Yield the jobs of each round trip."""
    for prepared in _each(jobs):
        if full := packer.add(prepared):
            yield full
    if rest := packer.rest():
        yield rest


def _each(jobs: Many[Item]) -> Iterator[Item]:
    yield from jobs
