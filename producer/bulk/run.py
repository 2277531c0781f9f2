"""Submit a file of jobs exactly once, and write their results.

The same file always gives the same jobs with the same ids (`bulk/jobs.py`), and the queue accepts each id once. The
journal avoids submitting them again, and is kept longer than the queue keeps ids. Prints nothing.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO, NamedTuple

from sluice.producer.bulk.output import bad_line, encoded, error_line, output_line
from sluice.producer.bulk.summary import Summary
from sluice.producer.client import Producer
from sluice.producer.contract.bulk.input import STDIN, BadLine, Endpoint, Line, LineReader, lines, opened
from sluice.producer.contract.bulk.jobs import NAME_BYTES, BulkSpec, LineJobs
from sluice.producer.contract.bulk.journal import Journal, name_of
from sluice.producer.contract.calls import NewJob
from sluice.producer.contract.jobs import Options, Prepared
from sluice.producer.contract.wire import JobId
from sluice.producer.errors import InvalidJob, JobNotDone, LessDurable, ProducerError, QueueFull
from sluice.producer.operations.backpressure import no_room
from sluice.producer.operations.results import Outcome

REPORT_EVERY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkSettings:
    """How to process a file."""

    path: str
    """`-` for standard input."""

    batch: str
    endpoint: Endpoint | None = None
    model: str | None = None
    defaults: Options = field(default_factory=Options)
    partitions: int = 1
    is_again: bool = False
    """Run the file again, deliberately, as new jobs."""

    is_strict: bool = False
    """Submit nothing if any line is bad."""

    is_waiting: bool = False
    """Whether `wait` will be called; then every job is kept in memory."""

    is_ordered: bool = False
    """Write output lines in the order of the input."""

    output: Path | None = None
    errors: Path | None = None
    journal: Path | None = None

    @property
    def spec(self) -> BulkSpec:
        """The parameters that determine the jobs of the file."""
        return BulkSpec(
            batch=self.batch,
            endpoint=self.endpoint,
            model=self.model,
            defaults=self.defaults,
            partitions=self.partitions,
        )


def default_batch(path: str) -> str:
    """Return the default batch name of a file: its name and a hash of its path."""
    where = str(Path(path).absolute()) if path != STDIN else str(time.time_ns())
    stem = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in Path(path).name.split(".")[0])
    return f"{(stem or 'batch')[:48]}-{blake2b(where.encode(), digest_size=4).hexdigest()}"


class SubmittedLine(NamedTuple):
    """A line whose job has not ended. A named tuple, because one is kept per line."""

    number: int
    custom_id: str
    endpoint: Endpoint
    model: str | None


@dataclass(slots=True, eq=False)
class Counts:
    """The progress of a run. Mutable."""

    lines: int = 0
    accepted: int = 0
    before: int = 0
    """Lines that were submitted before, from this file or a copy of it."""

    bad: int = 0
    ended: int = 0
    written_before: int = 0
    """Lines that were already in the output or error file."""

    full: QueueFull | None = None
    """Set while the queue is full and the run waits."""


Listener = Callable[[Counts], None]


class BadFile(ProducerError):
    """A strict run has bad lines; nothing was submitted."""


class BulkRun:
    """One run of one file: `submit`, then `wait` for the results."""

    def __init__(self, producer: Producer, settings: BulkSettings, listener: Listener) -> None:
        self._producer = producer
        self._settings = settings
        self._listener = listener
        self._jobs = LineJobs(settings.spec)
        self._submitted: dict[JobId, SubmittedLine] = {}
        self._bad: list[BadLine] = []
        self._written: set[str] = set()
        self._room = producer.waits.wait()
        """The wait for room in the queue."""

        self.counts = Counts()
        self.summary = Summary()
        self.first_bad: list[BadLine] = []

    # ------------------------------------------------------------ submit

    def submit(self) -> None:
        """Submit every line that has not been submitted before.

        Raises:
            OSError: the file cannot be read.
            BadFile: strict, and a line is bad.
            QueueUnreachable, QueueRefused: the queue does not accept jobs now; run again to continue.
            LessDurable: the requested durability is not confirmed; run again to retry.
        """
        settings = self._settings
        self._written = self._already_written()
        asked = settings.spec.as_json()
        with (
            Journal(settings.journal, is_new_run=settings.is_again, asked=asked) as journal,
            self._error_file() as errors,
            self._producer.waits.wait() as self._room,
        ):
            self._jobs.run = journal.run
            self._submit_all(journal, errors)
        self._listener(self.counts)

    def _submit_all(self, journal: Journal, errors: "IO[str] | None") -> None:
        pending: deque[NewJob] = deque()
        refused: deque[NewJob] = deque()
        new = self._new_jobs(journal, errors)

        def feed() -> Iterator[Prepared]:
            for job in self._until_room(refused, new):
                pending.append(job)
                yield job, True

        while True:
            for answer in self._producer.submit_prepared(feed()):
                self._answered(pending.popleft(), answer, refused, journal, errors)
            if not refused:
                return

    def _until_room(self, refused: deque[NewJob], new: Iterator[NewJob]) -> Iterator[NewJob]:
        """Yield jobs to send: first, after a pause, those that the full queue refused."""
        while True:
            if refused:
                time.sleep(self.counts.full.retry_after_s if self.counts.full else 0)
                self.counts.full = None
                again = list(refused)
                refused.clear()
                yield from again
            elif (job := next(new, None)) is not None:
                yield job
            else:
                return

    def _answered(
        self,
        job: NewJob,
        answer: object,
        refused: deque[NewJob],
        journal: Journal,
        errors: "IO[str] | None",
    ) -> None:
        if isinstance(answer, QueueFull):
            refused.append(job)
            self.counts.full = answer
            self._listener(self.counts)
            if self._room.is_due:
                self._room.waits_for(no_room(answer))
            return
        if isinstance(answer, LessDurable):
            raise answer  # not in the journal: the next run submits it again, and the queue accepts it once
        is_refused = isinstance(answer, ProducerError)
        sent = self._submitted[job.id] if self._settings.is_waiting and not is_refused else self._submitted.pop(job.id)
        if isinstance(answer, ProducerError):
            self._refuse(BadLine(sent.number, sent.custom_id, "refused", str(answer)), name_of(job.id), errors)
            return
        self._room.goes_on()
        journal.add(job.id)
        if getattr(answer, "is_duplicate", False):
            self.counts.before += 1
        else:
            self.counts.accepted += 1
        if self.counts.accepted % REPORT_EVERY == 0:
            self._listener(self.counts)

    def _new_jobs(self, journal: Journal, errors: "IO[str] | None") -> Iterator[NewJob]:
        """Yield the jobs of the file that were not submitted before."""
        for line in self._lines():
            self.counts.lines += 1
            if isinstance(line, BadLine):
                self._refuse(line, self._bad_name(line), errors)
                continue
            try:
                job = self._jobs.job(line)
            except InvalidJob as error:
                bad = BadLine(line.number, line.custom_id, "invalid_request", str(error))
                self._refuse(bad, self._bad_name(bad), errors)
                continue
            if name_of(job.id) in self._written:
                self.counts.written_before += 1
                continue
            sent = SubmittedLine(line.number, line.name, line.endpoint, line.options.get("model"))
            is_acknowledged = name_of(job.id) in journal
            if self._settings.is_waiting or not is_acknowledged:
                self._submitted[job.id] = sent
            if is_acknowledged:
                self.counts.before += 1
            else:
                yield job

    def _lines(self) -> Iterator[Line | BadLine]:
        reader = LineReader(
            endpoint=self._settings.endpoint, model=self._settings.model, defaults=self._settings.defaults
        )
        with opened(self._settings.path) as file:
            found = (reader.read(number, line) for number, line in lines(file))
            yield from self._all_or_nothing(found) if self._settings.is_strict else found

    def _all_or_nothing(self, found: Iterator[Line | BadLine]) -> list[Line | BadLine]:
        kept = [self._looked_at(line) for line in found]
        bad = [line for line in kept if isinstance(line, BadLine)]
        if bad:
            self.first_bad = bad
            raise BadFile(f"{len(bad)} lines are bad and nothing was submitted (--strict). The first: "
                          f"line {bad[0].number}: {bad[0].message}")  # fmt: skip
        return kept

    def _looked_at(self, line: Line | BadLine) -> Line | BadLine:
        if isinstance(line, Line):
            try:
                self._jobs.template(line.options).new_job(line.prompt)
            except InvalidJob as error:
                return BadLine(line.number, line.custom_id, "invalid_request", str(error))
        return line

    def _bad_name(self, bad: BadLine) -> str:
        identity = json.dumps([self._settings.batch, self._jobs.run, bad.number, bad.message]).encode()
        return blake2b(identity, digest_size=NAME_BYTES).hexdigest()

    def _refuse(self, bad: BadLine, name: str, errors: "IO[str] | None") -> None:
        self.counts.bad += 1
        self.summary.bad_lines += 1
        self.summary.add_reason(bad.code, f"line {bad.number}: {bad.message}")
        if len(self.first_bad) < 20:
            self.first_bad.append(bad)
        if errors is not None and name not in self._written:
            errors.write(encoded(bad_line(name, bad)))

    # ------------------------------------------------------------ wait

    def wait(self) -> None:
        """Wait for every job of the file and write its line as it ends, or in the order of the input.

        Raises:
            OSError: a file cannot be written.
            QueueUnreachable: the server stayed unreachable; run again to continue.
        """
        with self._output_file() as output, self._error_file() as errors:
            outcomes = self._producer.results(list(self._submitted), with_entries=True)
            for outcome in self._in_order(outcomes) if self._settings.is_ordered else outcomes:
                self._ended(outcome, output, errors)
        self._listener(self.counts)

    def _in_order(self, outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
        early: dict[JobId, Outcome] = {}
        for job_id in list(self._submitted):
            while job_id not in early:
                outcome = next(outcomes)
                early[outcome.job_id] = outcome
            yield early.pop(job_id)

    def _ended(self, outcome: Outcome, output: "IO[str] | None", errors: "IO[str] | None") -> None:
        self.counts.ended += 1
        sent, name = self._submitted[outcome.job_id], name_of(outcome.job_id)
        if outcome.error is not None or outcome.result is None or outcome.view is None:
            self.summary.failed += 1
            self.summary.add_reason(*_reason_of(outcome, sent))
            if errors is not None and outcome.error is not None:
                errors.write(encoded(error_line(name, sent.custom_id, outcome.error)))
        else:
            self.summary.add(outcome.view, outcome.result, outcome.entries)
            if output is not None:
                line = output_line(name, sent.custom_id, sent.endpoint, outcome.result, model=sent.model)
                output.write(encoded(line))
        self._listener(self.counts)

    # ------------------------------------------------------------ files

    def _already_written(self) -> set[str]:
        """Return the names of lines that an earlier run wrote; an incomplete last line is truncated."""
        if self._settings.is_again:
            for path in (self._settings.output, self._settings.errors):
                if path is not None:
                    path.unlink(missing_ok=True)
            return set()
        return _names_in(self._settings.output) | _names_in(self._settings.errors)

    @contextmanager
    def _output_file(self) -> "Generator[IO[str] | None]":
        with _appending(self._settings.output) as file:
            yield file

    @contextmanager
    def _error_file(self) -> "Generator[IO[str] | None]":
        with _appending(self._settings.errors) as file:
            yield file


def _reason_of(outcome: Outcome, sent: SubmittedLine) -> tuple[str, str]:
    """Return the error code and the reason of a job that is not done."""
    error = outcome.error
    if isinstance(error, JobNotDone):
        return error.code or error.state, f"line {sent.number}: {error.reason}"
    return "result_lost", f"line {sent.number}: {error}"


@contextmanager
def _appending(path: Path | None) -> "Generator[IO[str] | None]":
    if path is None:
        yield None
        return
    with path.open("a", encoding="utf-8") as file:
        yield file


def _names_in(path: Path | None) -> set[str]:
    if path is None or not path.is_file():
        return set()
    names: set[str] = set()
    whole = 0
    with path.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(whole)
                break
            whole += len(line)
            names.add(_name_in(line))
    return names


def _name_in(line: bytes) -> str:
    try:
        return str(json.loads(line)["id"]).removeprefix("batch_req_")
    except (ValueError, KeyError, TypeError):
        return ""
