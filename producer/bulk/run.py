"""Submit a file of jobs exactly once, and write their results.

The same file always gives the same jobs with the same ids (`bulk/jobs.py`), and the queue accepts each id once. The
journal prevents submitting them again, also after the queue has forgotten the ids. Results are read while lines are
submitted, because the queue keeps them for a limited time. Nothing is printed.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Self

from sluice.producer.bulk.files import ErrorsFile, LineFile
from sluice.producer.bulk.line_names import check_names
from sluice.producer.bulk.open_lines import JobsOfLine, SubmittedLine
from sluice.producer.bulk.output import bad_line, error_line, line_of_many, output_line, refused_code
from sluice.producer.bulk.recorded import RecordedOutcomes
from sluice.producer.bulk.summary import Summary
from sluice.producer.client import Producer
from sluice.producer.errors import (
    InvalidJob,
    InvalidSetting,
    JobNotDone,
    JobNotFound,
    LessDurable,
    ProducerError,
    QueueFull,
    ResultExpired,
)
from sluice.producer.operations.backpressure import no_room
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.results import IDLE_SHARE, Outcome
from sluice.protocol.bulk_files.input import BadLine, Line, LineReader, is_stream, lines, opened
from sluice.protocol.bulk_files.jobs import NAME_BYTES, BulkSpec, LineJobs
from sluice.protocol.bulk_files.journal import Journal, name_of
from sluice.protocol.calls import NewJob
from sluice.protocol.chains.chain import After
from sluice.protocol.jobs import Options, Prepared
from sluice.protocol.openai_format.requests import Endpoint
from sluice.protocol.wire import JobId, JobResult

REPORT_EVERY = 256
MAX_ASKED = 512
"""Most jobs whose outcomes are read at once while lines are submitted."""

PAUSE_S = 0.1
"""Longest sleep while the queue is full; outcomes are read in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkSettings:
    """The settings of a run."""

    path: str
    """Path of the file; `-`: standard input."""

    batch: str
    endpoint: Endpoint | None = None
    model: str | None = None
    defaults: Options = field(default_factory=Options)
    is_again: bool = False
    """Run the file again, as new jobs."""

    is_strict: bool = False
    """Submit nothing if any line is invalid."""

    is_waiting: bool = False
    """Whether `wait` will be called: outcomes are written, and every unfinished job is kept in memory."""

    is_ordered: bool = False
    """Write output lines in the order of the input."""

    after: After | None = None
    """What every job waits for. The jobs are the same whatever that is."""

    output: Path | None = None
    errors: Path | None = None
    journal: Path | None = None
    database_url: str | None = None
    """URL of the job history, for outcomes that have expired in the queue."""

    def spec(self, queue: Queue, partitions: int | None = None) -> BulkSpec:
        """Return the parameters that determine the jobs of the file on a queue.

        Args:
            queue: The queue, whose settings have been read.
            partitions: The number of partitions that the run began with, if it continues. It is kept, because another
                number would change the ids of its jobs. Ids for fewer partitions are valid with more.

        Raises:
            InvalidSetting: the queue has fewer partitions by now.
        """
        if partitions is not None and queue.is_named and queue.partitions < partitions:
            raise InvalidSetting(
                f"nothing was submitted: batch {self.batch!r} was begun on {partitions} partitions of queue "
                f"{queue.name!r}, which has {queue.partitions} now. Serve {partitions} again, or run every line as a "
                "new job with --again."
            )
        return BulkSpec(
            queue=queue.name,
            batch=self.batch,
            endpoint=self.endpoint,
            model=self.model,
            defaults=self.defaults,
            partitions=queue.partitions if partitions is None else partitions,
        )


def default_batch(path: str) -> str:
    """Return the default batch name of a file: its name and a hash of its path, or of the time for a stream."""
    where = str(time.time_ns()) if is_stream(path) else str(Path(path).absolute())
    stem = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in Path(path).name.split(".")[0])
    return f"{(stem or 'batch')[:48]}-{blake2b(where.encode(), digest_size=4).hexdigest()}"


@dataclass(slots=True, eq=False)
class BulkCounts:
    """The progress of a run. Mutable."""

    lines: int = 0
    accepted: int = 0
    before: int = 0
    """Lines that were submitted by earlier runs, of this file or a copy."""

    bad: int = 0
    ended: int = 0
    written_before: int = 0
    """Lines that were already in the output file."""

    full: QueueFull | None = None
    """Set while the queue is full and the run waits."""


Listener = Callable[[BulkCounts], None]


class BadFile(ProducerError):
    """A strict run has invalid lines; nothing was submitted."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The open, locked files of a run."""

    journal: Journal
    output: LineFile
    errors: ErrorsFile
    recorded: RecordedOutcomes


class BulkRun:
    """One run of one file: `submit`, then `wait` for the results. Create it by `BulkRun.opened`."""

    def __init__(self, producer: Producer, settings: BulkSettings, listener: Listener, files: RunFiles) -> None:
        self._producer = producer
        self._settings = settings
        self._listener = listener
        self._journal, self._output, self._errors = files.journal, files.output, files.errors
        self._recorded = files.recorded
        self._spec = settings.spec(producer.target, files.journal.partitions)
        self._jobs = LineJobs(self._spec, run=files.journal.run)
        self._submitted: dict[JobId, SubmittedLine] = {}
        self._unfinished: deque[JobId] = deque()
        """Accepted jobs whose end is awaited."""

        self._ask_s = 0.0
        """When to read outcomes next, on the monotonic clock."""

        self._order: deque[JobId] = deque()
        """Unwritten jobs in the order of the input, if the output is ordered."""

        self._early: dict[JobId, Outcome] = {}
        """Outcomes that must be written after others."""

        self.counts = BulkCounts()
        self.summary = Summary()
        self.first_bad: list[BadLine] = []
        self._bad_names = _digest(producer.target.name, settings.batch)
        """Prefix of the names of invalid lines of this batch."""

        self._room = producer.waits.wait()
        """The wait for room in the queue."""

    @classmethod
    @contextmanager
    def opened(cls, producer: Producer, settings: BulkSettings, listener: Listener) -> Generator[Self]:
        """Open the files of a run; close them at the end of the context.

        Raises:
            FileInUse: another process uses one of them.
            InvalidSetting: the queue has fewer partitions than when the batch began.
            OSError: the journal or an output file of an earlier run cannot be read.
        """
        producer.run(producer.target.read())
        spec, is_new = settings.spec(producer.target).as_json(), settings.is_again
        with (
            Journal(settings.journal, is_new_run=is_new, asked=spec) as journal,
            LineFile(settings.output, is_new=is_new) as output,
            ErrorsFile(settings.errors, is_new=is_new) as errors,
            RecordedOutcomes(settings.database_url, producer.target.name) as recorded,
        ):
            yield cls(producer, settings, listener, RunFiles(journal, output, errors, recorded))

    @property
    def history_problem(self) -> str | None:
        """Why the history could not be read, if it was needed."""
        return self._recorded.problem

    # ------------------------------------------------------------ submit

    def submit(self) -> None:
        """Submit every line that has not been submitted before; write outcomes meanwhile if the run waits for them.

        Raises:
            OSError: a file cannot be read or written.
            BadFile: the run is strict, and a line is invalid.
            LinesRenamed: lines have different names than in an earlier run.
            QueueUnreachable, QueueRefused: the queue does not accept jobs now; run again to continue.
            LessDurable: the requested durability is not confirmed; run again to retry.
        """
        try:
            with self._room:
                self._submit_all()
        finally:
            self._journal.flush()
        if not self._settings.is_waiting:
            self._errors.remove_stale(self._is_ours)
        self._listener(self.counts)

    def _submit_all(self) -> None:
        pending: deque[NewJob] = deque()
        refused: deque[NewJob] = deque()
        new = self._new_jobs()

        def feed() -> Iterator[Prepared]:
            for job in self._until_room(refused, new):
                pending.append(job)
                yield job, True

        while True:
            for answer in self._producer.submit_prepared(feed(), after=self._settings.after):
                self._answered(pending.popleft(), answer, refused)
            if not refused:
                return

    def _until_room(self, refused: deque[NewJob], new: Iterator[NewJob]) -> Iterator[NewJob]:
        """Yield jobs to send: after a pause first those that the full queue refused, then new ones."""
        while True:
            self._write_ended()
            if refused:
                self._pause(self.counts.full.retry_after_s if self.counts.full else 0)
                self.counts.full = None
                again = list(refused)
                refused.clear()
                yield from again
            elif (job := next(new, None)) is not None:
                yield job
            else:
                return

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (rest_s := until_s - time.monotonic()) > 0:
            time.sleep(min(rest_s, PAUSE_S))
            self._write_ended()

    def _answered(self, job: NewJob, answer: object, refused: deque[NewJob]) -> None:
        if isinstance(answer, QueueFull):
            refused.append(job)
            self.counts.full = answer
            self._listener(self.counts)
            if self._room.is_due:
                self._room.waits_for(no_room(answer))
            return
        if isinstance(answer, LessDurable):
            raise answer  # not in the journal, so the next run submits it again, and the queue accepts it once
        sent = self._submitted.get(job.id)
        if sent is None:
            return  # another job of its line was refused meanwhile
        if isinstance(answer, ProducerError):
            self._close(sent, job.id)
            self._refuse(BadLine(sent.number, sent.custom_id, refused_code(answer), str(answer)))
            return
        self._room.goes_on()
        self._journal.add(job.id, sent.number)
        self._output.begin()
        self._errors.begin()
        self._accepted(job.id)
        if getattr(answer, "is_duplicate", False):
            self.counts.before += sent.is_first(job.id)
        else:
            self.counts.accepted += sent.is_first(job.id)
        if self.counts.accepted % REPORT_EVERY == 0:
            self._listener(self.counts)

    def _accepted(self, job_id: JobId) -> None:
        if self._settings.is_waiting:
            self._unfinished.append(job_id)
        else:
            del self._submitted[job_id]
            self._errors.keep(name_of(job_id))  # it is not checked whether the job still fails

    def _new_jobs(self) -> Iterator[NewJob]:
        """Yield the jobs of the file that were not submitted before."""
        for line in self._lines():
            self.counts.lines += 1
            if isinstance(line, BadLine):
                self._refuse(line)
                continue
            try:
                jobs = self._jobs.jobs(line)
            except InvalidJob as error:
                self._refuse(line.refused(error))
                continue
            if name_of(jobs[0].id) in self._output:
                self.counts.written_before += 1
                continue
            yield from self._new_jobs_of(line, jobs)

    def _new_jobs_of(self, line: Line, jobs: list[NewJob]) -> Iterator[NewJob]:
        """Yield those jobs of a line that were not submitted before."""
        many = None if line.many is None else JobsOfLine(line.many, tuple([job.id for job in jobs]))
        sent = SubmittedLine(line.number, line.name, line.endpoint, line.options.get("model"), many)
        self._submitted.update((job.id, sent) for job in jobs)
        if self._settings.is_ordered:
            self._order.append(jobs[0].id)
        for job in jobs:
            if job.id not in self._submitted:
                return  # another of them was refused
            if name_of(job.id) in self._journal:
                self.counts.before += sent.is_first(job.id)
                self._accepted(job.id)
            else:
                yield job

    def _lines(self) -> Iterator[Line | BadLine]:
        has_run = len(self._journal) > 0 or len(self._output) > 0
        is_once = is_stream(self._settings.path)
        if has_run and not is_once:
            with self._read() as lines:
                self._check_names(lines)
        with self._read() as lines:
            if self._settings.is_strict:
                lines = self._all_or_nothing(lines)
            if has_run and is_once:
                lines = list(lines)
                self._check_names(lines)
            yield from lines

    @contextmanager
    def _read(self) -> Generator[Iterable[Line | BadLine]]:
        reader = LineReader(
            endpoint=self._settings.endpoint, model=self._settings.model, defaults=self._settings.defaults
        )
        with opened(self._settings.path) as file:
            yield (reader.read(number, line) for number, line in lines(file))

    def _check_names(self, lines: Iterable[Line | BadLine]) -> None:
        check_names(lines, LineJobs(self._spec, run=self._journal.run), self._journal, self._output)

    def _all_or_nothing(self, lines: Iterable[Line | BadLine]) -> list[Line | BadLine]:
        kept = [self._looked_at(line) for line in lines]
        bad = [line for line in kept if isinstance(line, BadLine)]
        if bad:
            self.first_bad = bad
            first = f"The first: line {bad[0].number}: {bad[0].message}"
            raise BadFile(f"{len(bad)} lines are bad and nothing was submitted (--strict). {first}")
        return kept

    def _looked_at(self, line: Line | BadLine) -> Line | BadLine:
        if isinstance(line, Line):
            try:
                for prompt in line.prompts:
                    self._jobs.template(line.options).new_job(prompt)
            except InvalidJob as error:
                return line.refused(error)
        return line

    def _is_ours(self, name: str) -> bool:
        """Return whether a line of the errors file belongs to this batch, since batches may share the file."""
        return name in self._journal or name.startswith(self._bad_names)

    def _refuse(self, bad: BadLine) -> None:
        self.counts.bad += 1
        self.summary.bad_lines += 1
        self.summary.add_reason(bad.code, f"line {bad.number}: {bad.message}")
        if len(self.first_bad) < 20:
            self.first_bad.append(bad)
        name = self._bad_names + _digest(bad.number, bad.message)
        self._errors.report(name, bad_line(name, bad))

    # ------------------------------------------------------------ outcomes

    def wait(self) -> None:
        """Wait for every job of the file and write its line as it ends, or in the order of the input.

        Raises:
            OSError: a file cannot be written.
            QueueUnreachable: the server stayed unreachable; run again to continue.
        """
        for outcome in self._producer.results(self._unfinished, with_entries=True):
            self._ended(outcome)
        self._errors.remove_stale(self._is_ours)
        self._listener(self.counts)

    def _write_ended(self) -> None:
        """Write the outcomes of some jobs that have ended, if it is time to read them."""
        begin_s = time.monotonic()
        if begin_s < self._ask_s or not self._unfinished:
            return
        job_ids = [self._unfinished.popleft() for _ in range(min(MAX_ASKED, len(self._unfinished)))]
        ended: set[JobId] = set()
        for outcome in self._producer.results(job_ids, with_entries=True, is_waiting=False):
            ended.add(outcome.job_id)
            self._ended(outcome)
        self._unfinished.extend(job_id for job_id in job_ids if job_id not in ended)
        end_s = time.monotonic()
        self._ask_s = end_s + IDLE_SHARE * (end_s - begin_s)

    def _ended(self, outcome: Outcome) -> None:
        sent = self._submitted.get(outcome.job_id)
        if sent is None:
            return  # another job of its line was refused
        if sent.many is not None:
            if not sent.many.add(outcome):
                return
            outcome = sent.many.outcomes[0]
        self.counts.ended += 1
        if self._settings.is_ordered:
            self._early[outcome.job_id] = outcome
            self._write_in_order()
        else:
            self._write(outcome)
        self._listener(self.counts)

    def _write_in_order(self) -> None:
        while self._order:
            job_id = self._order[0]
            if job_id in self._early:
                self._write(self._early.pop(job_id))
            elif job_id in self._submitted:
                return
            self._order.popleft()

    def _write(self, outcome: Outcome) -> None:
        sent, name = self._submitted[outcome.job_id], name_of(outcome.job_id)
        self._close(sent, outcome.job_id)
        outcomes = [self._recorded_if_gone(one) for one in ([outcome] if sent.many is None else sent.many.outcomes)]
        results = [one.result for one in outcomes if one.result is not None and one.error is None]
        if len(results) == len(outcomes):
            for one, result in zip(outcomes, results, strict=True):
                self.summary.add(one.view, result, one.entries)
            self._write_results(name, sent, results)
            return
        outcome = next(one for one in outcomes if one.result is None or one.error is not None)
        if isinstance(outcome.error, JobNotDone):
            error = outcome.error
            self.summary.add_failure(error.code or error.state, f"line {sent.number}: {error.reason}")
            self._errors.report(name, error_line(name, sent.custom_id, error, sent.endpoint))
        elif name in self._errors:
            self.summary.add_failure("failed_before", f"line {sent.number}: see {self._settings.errors}")
            self._errors.keep(name)
        else:
            self.summary.add_missing(f"line {sent.number}, job {outcome.job_id}")

    def _write_results(self, name: str, sent: SubmittedLine, results: list[JobResult]) -> None:
        if sent.many is None:
            self._output.append(output_line(name, sent.custom_id, sent.endpoint, results[0], model=sent.model))
            return
        line, is_done = line_of_many(name, sent.custom_id, sent.many.request, results, model=sent.model)
        if is_done:
            self._output.append(line)
        else:
            self._errors.report(name, line)

    def _recorded_if_gone(self, outcome: Outcome) -> Outcome:
        """Return an outcome, from the history if the queue no longer has it."""
        if isinstance(outcome.error, JobNotFound | ResultExpired):
            return self._recorded.find(outcome.job_id) or outcome
        return outcome

    def _close(self, sent: SubmittedLine, job_id: JobId) -> None:
        """Forget a line that has ended."""
        for one in sent.ids(job_id):
            self._submitted.pop(one, None)


def _digest(*identity: str | int) -> str:
    """Return a digest of half the length of a name."""
    return blake2b(json.dumps(identity).encode(), digest_size=NAME_BYTES // 2).hexdigest()
