"""Submit a file of jobs, once, and write what became of them.

Whoever reads the same file again, here or elsewhere, submits the same jobs (`bulk_jobs` draws their ids), and the queue
takes each once. The journal beside that spares the second asking and outlives the queue's memory. Prints nothing.
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

from producer.bulk_input import STDIN, BadLine, Endpoint, Line, LineReader, lines, opened
from producer.bulk_jobs import NAME_BYTES, Drawing, LineJobs
from producer.bulk_output import bad_line, encoded, error_line, output_line
from producer.client import Producer
from producer.contract.calls import NewJob
from producer.contract.wire import JobId
from producer.errors import InvalidJob, LessDurable, ProducerError, QueueFull
from producer.jobs import Options, Prepared
from producer.journal import Journal, name_of
from producer.outcomes import Outcome
from producer.summary import Summary

REPORT_EVERY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkSettings:
    """What to do with a file."""

    path: str
    """`-` for standard input."""

    batch: str
    endpoint: Endpoint | None = None
    model: str | None = None
    defaults: Options = field(default_factory=Options)
    partitions: int = 1
    is_again: bool = False
    """Run it anew, deliberately."""

    is_strict: bool = False
    """Submit nothing if any line is bad."""

    is_waiting: bool = False
    """`wait` will be called: every job must be remembered."""

    is_ordered: bool = False
    """Write output lines in the order of the input."""

    output: Path | None = None
    errors: Path | None = None
    journal: Path | None = None

    @property
    def drawing(self) -> Drawing:
        """What decides which jobs the file's lines become."""
        return Drawing(
            batch=self.batch,
            endpoint=self.endpoint,
            model=self.model,
            defaults=self.defaults,
            partitions=self.partitions,
        )


def default_batch(path: str) -> str:
    """A name for the batch of a file: its own, and a hash of where it is."""
    where = str(Path(path).absolute()) if path != STDIN else str(time.time_ns())
    stem = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in Path(path).name.split(".")[0])
    return f"{(stem or 'batch')[:48]}-{blake2b(where.encode(), digest_size=4).hexdigest()}"


class Sent(NamedTuple):
    """What is remembered of a line until its job has ended. One for each line: a named tuple is small."""

    number: int
    custom_id: str
    endpoint: Endpoint
    model: str | None


@dataclass(slots=True, eq=False)
class Counts:
    """How far a run is. Changes with every line."""

    lines: int = 0
    accepted: int = 0
    before: int = 0
    """Submitted before, by this file or another copy of it."""

    bad: int = 0
    ended: int = 0
    written_before: int = 0
    """Already in the output or error file."""

    full: QueueFull | None = None
    """The queue is full, and the run waits."""


Listener = Callable[[Counts], None]


class BadFile(ProducerError):
    """Lines are bad, and the run is strict: nothing was submitted."""


class BulkRun:
    """One run of one file: `submit`, then `wait` for what became of it."""

    def __init__(self, producer: Producer, settings: BulkSettings, listener: Listener) -> None:
        self._producer = producer
        self._settings = settings
        self._listener = listener
        self._jobs = LineJobs(settings.drawing)
        self._sent: dict[JobId, Sent] = {}
        self._bad: list[BadLine] = []
        self._written: set[str] = set()
        self.counts = Counts()
        self.summary = Summary()
        self.first_bad: list[BadLine] = []

    # ------------------------------------------------------------ submit

    def submit(self) -> None:
        """Submit every line that has not been submitted yet.

        Raises:
            OSError: the file cannot be read.
            BadFile: strict, and a line is bad.
            QueueUnreachable, QueueRefused: the queue does not take jobs now; run again to go on.
            LessDurable: the durability asked for is not confirmed; run again to ask once more.
        """
        settings = self._settings
        self._written = self._already_written()
        asked = settings.drawing.as_json()
        with (
            Journal(settings.journal, is_new_run=settings.is_again, asked=asked) as journal,
            self._error_file() as errors,
        ):
            self._jobs.run = journal.run
            self._submit_all(journal, errors)
        self._listener(self.counts)

    def _submit_all(self, journal: Journal, errors: "IO[str] | None") -> None:
        pending: deque[tuple[JobId, NewJob]] = deque()
        refused: deque[NewJob] = deque()
        new = self._new_jobs(journal, errors)

        def feed() -> Iterator[Prepared]:
            for job in self._until_room(refused, new):
                pending.append((job.id, job))
                yield job, True

        while True:
            for answer in self._producer.submit_prepared(feed()):
                _, job = pending.popleft()
                self._answered(job, answer, refused, journal, errors)
            if not refused:
                return

    def _until_room(self, refused: deque[NewJob], new: Iterator[NewJob]) -> Iterator[NewJob]:
        """What to send next: first, after a pause, what the full queue refused."""
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
            return
        if isinstance(answer, LessDurable):
            raise answer  # not in the journal: the next run submits it again, and the queue takes it once
        is_refused = isinstance(answer, ProducerError)
        sent = self._sent[job.id] if self._settings.is_waiting and not is_refused else self._sent.pop(job.id)
        if isinstance(answer, ProducerError):
            self._refuse(BadLine(sent.number, sent.custom_id, "refused", str(answer)), name_of(job.id), errors)
            return
        journal.add(job.id)
        if getattr(answer, "is_duplicate", False):
            self.counts.before += 1
        else:
            self.counts.accepted += 1
        if self.counts.accepted % REPORT_EVERY == 0:
            self._listener(self.counts)

    def _new_jobs(self, journal: Journal, errors: "IO[str] | None") -> Iterator[NewJob]:
        """The file's jobs that were not submitted before."""
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
            custom_id = line.custom_id or f"line-{line.number}"
            sent = Sent(line.number, custom_id, line.endpoint, line.options.get("model"))
            is_acknowledged = name_of(job.id) in journal
            if self._settings.is_waiting or not is_acknowledged:
                self._sent[job.id] = sent
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
        if len(self.first_bad) < 20:
            self.first_bad.append(bad)
        if errors is not None and name not in self._written:
            errors.write(encoded(bad_line(name, bad)))

    # ------------------------------------------------------------ wait

    def wait(self) -> None:
        """Wait for every job of the file, and write its line as it ends (or in the input's order).

        Raises:
            OSError: a file cannot be written.
            QueueUnreachable: the server stayed away; run again to go on.
        """
        with self._output_file() as output, self._error_file() as errors:
            outcomes = self._producer.results(list(self._sent), with_entries=True)
            for outcome in self._in_order(outcomes) if self._settings.is_ordered else outcomes:
                self._ended(outcome, output, errors)
        self._listener(self.counts)

    def _in_order(self, outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
        early: dict[JobId, Outcome] = {}
        for job_id in list(self._sent):
            while job_id not in early:
                outcome = next(outcomes)
                early[outcome.job_id] = outcome
            yield early.pop(job_id)

    def _ended(self, outcome: Outcome, output: "IO[str] | None", errors: "IO[str] | None") -> None:
        self.counts.ended += 1
        sent, name = self._sent[outcome.job_id], name_of(outcome.job_id)
        if outcome.error is not None or outcome.result is None or outcome.view is None:
            self.summary.failed += 1
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
        """Names of lines that an earlier run wrote; a line that it could not finish is cut off."""
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
