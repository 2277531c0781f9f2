"""The lines of a batch's file: each must be a request of OpenAI's batch format, and becomes one job or more.

The id and the seed of a job derive from the batch and the number of its line, so a line that is submitted again is the
same job.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from hashlib import blake2b
from itertools import islice
from time import monotonic
from typing import BinaryIO, NamedTuple

from sluice.gateway.batches.batch import StoredBatch
from sluice.producer.errors import InvalidJob, InvalidSetting
from sluice.protocol.bulk_files.input import BadLine, Line, LineReader, lines
from sluice.protocol.bulk_files.jobs import NAME_BYTES, BulkSpec, LineJobs
from sluice.protocol.calls import NewJob, SourceLine
from sluice.protocol.job_ids import job_id_of
from sluice.protocol.jobs import Options, partition_of
from sluice.protocol.openai_format.requests import ManyPrompts
from sluice.protocol.wire import JobId

MAX_ERRORS = 100
"""Most invalid lines that a batch lists."""

MAX_LINES = 1_000_000
Tick = Callable[[], None]
"""Callback before each line; it raises to stop the work."""


class LineOfMany(NamedTuple):
    """A line of several jobs. A named tuple, because a file may have a million."""

    num_jobs: int
    offset: int
    """Where the line, or blank ones before it, begins in the file, in bytes."""


@dataclass(frozen=True, slots=True)
class Names:
    """The custom ids of a file's lines, and their numbers in the file, by their places among those not blank."""

    custom_ids: tuple[str, ...]
    numbers: tuple[int, ...] | None = None
    """None if they are 1, 2, 3 and so on."""

    many: Mapping[int, "LineOfMany"] = field(default_factory=dict[int, "LineOfMany"])
    """The lines whose answer is made of the results of several jobs, by their places."""

    def number(self, place: int) -> int:
        """Return the number of a line from its place among the lines that are not blank."""
        return place + 1 if self.numbers is None else self.numbers[place]

    def num_jobs(self, place: int) -> int:
        """Return the number of jobs of a line."""
        found = self.many.get(place)
        return 1 if found is None else found.num_jobs

    def num_jobs_before(self, place: int) -> int:
        """Return the number of jobs of all lines before a place."""
        return place + sum(many.num_jobs - 1 for at, many in self.many.items() if at < place)

    def encoded(self) -> bytes:
        """Encode the names as JSON."""
        many = [[place, *found] for place, found in self.many.items()]
        content = {"custom_ids": self.custom_ids, "numbers": self.numbers, "many": many}
        return json.dumps(content, separators=(",", ":")).encode()


def names_of(data: bytes) -> Names:
    """Decode the output of `Names.encoded`.

    Raises:
        ValueError: the data is not valid, or was cut short.
    """
    try:
        content = json.loads(data)
        numbers = content["numbers"]
        many = {place: LineOfMany(*of_line) for place, *of_line in content["many"]}
        return Names(tuple(content["custom_ids"]), None if numbers is None else tuple(numbers), many)
    except (KeyError, TypeError) as error:
        raise ValueError("this is not a list of names") from error


class LineJobsOfBatch:
    """The builder of the jobs of one batch."""

    def __init__(self, batch: StoredBatch, seen_ids: Iterable[str] = ()) -> None:
        """Start after lines with these custom ids."""
        self._batch = batch
        self._jobs = LineJobs(BulkSpec(queue=batch.queue, batch=batch.id, partitions=batch.partitions))
        defaults = Options(tenant=batch.tenant)
        self._reader = LineReader(endpoint=None, model=None, defaults=defaults, of_batch=batch.endpoint, seen=seen_ids)

    def read(self, number: int, line: bytes | None) -> Line | BadLine:
        """Parse a line."""
        return self._reader.read(number, line)

    def jobs(self, line: Line) -> list[NewJob]:
        """Build the jobs of a line.

        Raises:
            InvalidJob: the line has an invalid value.
        """
        source = SourceLine(custom_id=line.name, number=line.number, endpoint=line.endpoint)
        template, batch = self._jobs.template(line.options), self._batch
        return [
            template.new_job(prompt, lambda _digest, index=index: identity_of(batch, line.number, index), source)
            for index, prompt in enumerate(line.prompts)
        ]


def identity_of(batch: StoredBatch, number: int, index: int = 0) -> tuple[JobId, int]:
    """Return the id and the seed of a job of a line; `index`: which of its jobs."""
    which = f"{number}\n{index}" if index else f"{number}"
    drawn = blake2b(f"{batch.id}\n{which}".encode(), digest_size=NAME_BYTES + 8).digest()
    name = drawn[:NAME_BYTES].hex()
    partition = partition_of(name, batch.partitions)
    return job_id_of(partition, batch.tenant, name), int.from_bytes(drawn[NAME_BYTES:])


class FileCheck:
    """The check of a whole file, in one go or in slices. Changes with each line.

    Args:
        batch: The batch of the file.
        slices: The output of `new_lines` for each slice so far, in order.

    Raises:
        ValueError: a slice is not valid, or was cut short.
    """

    def __init__(self, batch: StoredBatch, slices: Sequence[bytes] = ()) -> None:
        self._batch = batch
        self._custom_ids: list[str] = []
        self._numbers: list[int] = []
        self._many: dict[int, LineOfMany] = {}
        self._bad: list[BadLine] = []
        self._number, self._model = 0, _Model()
        self.offset = 0
        """Number of bytes of the file that are checked."""

        self._begins: list[tuple[int, int]] = []
        """Number of custom ids and of invalid lines before each slice, the last of which this object checks itself."""

        for data in slices:
            self._begin()
            self._read(data)
        self._begin()
        self._jobs = LineJobsOfBatch(batch, (*self._custom_ids, *(bad.custom_id for bad in self._bad if bad.custom_id)))

    @property
    def names(self) -> Names:
        """The custom ids of the valid lines so far."""
        are_plain = self._numbers == list(range(1, len(self._numbers) + 1))
        return Names(tuple(self._custom_ids), None if are_plain else tuple(self._numbers), self._many)

    @property
    def errors(self) -> Sequence[BadLine]:
        """The invalid lines so far, at most `MAX_ERRORS`."""
        return self._bad

    @property
    def model(self) -> str | None:
        """The model that the lines name."""
        return self._model.name

    def num_lines(self, since: int) -> int:
        """Return the number of lines, without blank ones, that were checked from slice `since` on."""
        return len(self._custom_ids) + len(self._bad) - sum(self._begins[since])

    def run(self, file: BinaryIO, tick: Tick, for_s: float = float("inf")) -> bool:
        """Check lines until the end of the file, or for `for_s` from the first line on; return whether that was all."""
        file.seek(self.offset)
        until_s: float | None = None
        try:
            for number, raw in lines(file, after=self._number):
                until_s = monotonic() + for_s if until_s is None else until_s
                tick()
                self._add(self._jobs.read(number, raw))
                self._number, self.offset = number, file.tell()
                if len(self._bad) >= MAX_ERRORS or len(self._custom_ids) > MAX_LINES:
                    break
                if monotonic() > until_s:
                    return False
        except InvalidSetting as error:  # a line, or a run of blank lines, is too long
            self._bad.append(BadLine(0, None, "invalid_file", str(error)))
        if len(self._custom_ids) > MAX_LINES:
            message = f"a batch has at most {MAX_LINES} requests"
            self._bad.append(BadLine(MAX_LINES + 1, None, "too_many_tasks", message))
        if not self._custom_ids and not self._bad:
            self._bad.append(BadLine(1, None, "empty_file", "the file has no requests"))
        return True

    def new_lines(self, since: int | None = None) -> bytes:
        """Encode the lines that this object has checked, merged with the slices from `since` on, as one slice."""
        first, first_bad = self._begins[-1 if since is None else since]
        content = {
            "custom_ids": self._custom_ids[first:],
            "numbers": self._numbers[first:],
            "many": [[place, *many] for place, many in self._many.items() if place >= first],
            "errors": [astuple(bad) for bad in self._bad[first_bad:]],
            "end": [self._number, self.offset],
            "model": [self._model.name, self._model.is_known],
        }
        return json.dumps(content, separators=(",", ":")).encode()

    def _begin(self) -> None:
        self._begins.append((len(self._custom_ids), len(self._bad)))

    def _read(self, data: bytes) -> None:
        try:
            content = json.loads(data)
            self._custom_ids += content["custom_ids"]
            self._numbers += content["numbers"]
            self._many |= {place: LineOfMany(*of_line) for place, *of_line in content["many"]}
            self._bad += [BadLine(*fields) for fields in content["errors"]]
            self._number, self.offset = content["end"]
            self._model = _Model(*content["model"])
        except (KeyError, TypeError) as error:
            raise ValueError("this is not a slice of a check") from error

    def _add(self, line: Line | BadLine) -> None:
        checked = _checked(self._batch, self._jobs, self._model, line)
        if isinstance(checked, BadLine):
            self._bad.append(checked)
        else:
            if checked.many is not None:
                # The offset is not yet that of the line's end.
                self._many[len(self._custom_ids)] = LineOfMany(len(checked.prompts), self.offset)
            self._custom_ids.append(checked.name)
            self._numbers.append(checked.number)


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line of a checked file."""

    place: int
    """Place among the lines that are not blank, from 0."""

    number: int
    data: bytes | None
    end: int
    """Offset of the line's end in the file, in bytes."""

    def jobs(self, jobs: LineJobsOfBatch) -> list[NewJob] | BadLine:
        """Return the jobs of the line, or why it has none: a release that accepted more may have checked the file."""
        line = jobs.read(self.number, self.data)
        if isinstance(line, BadLine):
            return line
        try:
            return jobs.jobs(line)
        except InvalidJob as error:
            return line.refused(error)


def request_in(batch: StoredBatch, file: BinaryIO, number: int, offset: int) -> ManyPrompts | None:
    """Read the request of a line of several jobs again; None if the file has changed."""
    file.seek(offset)
    _, data = next(lines(file, after=number - 1), (number, None))
    line = LineJobsOfBatch(batch).read(number, data)
    return None if isinstance(line, BadLine) else line.many


def lines_from(batch: StoredBatch, names: Names, file: BinaryIO) -> Iterator[RawLine]:
    """Yield the lines of a checked file that the batch has not submitted yet."""
    first, num_before, num_skipped = batch.submitted, 0, batch.submitted
    if batch.file_offset:
        file.seek(batch.file_offset)
        num_before, num_skipped = names.number(first - 1), 0
    rest = islice(lines(file, after=num_before), num_skipped, None)
    for place, (number, data) in enumerate(rest, first):
        yield RawLine(place, number, data, file.tell())


class _Model:
    """The model that all lines of a file name. Changes with the first line."""

    def __init__(self, name: str | None = None, is_known: bool = False) -> None:
        self.name, self.is_known = name, is_known

    def is_same(self, name: str | None) -> bool:
        """Return whether a line names the model of the first one."""
        if not self.is_known:
            self.name, self.is_known = name, True
        return name == self.name


def _checked(batch: StoredBatch, jobs: LineJobsOfBatch, model: _Model, line: Line | BadLine) -> Line | BadLine:
    if isinstance(line, BadLine):
        return line
    named = line.options.get("model")
    if not model.is_same(named):
        message = f"the line names model {named!r}, and the first line {model.name!r}: a batch has one model"
        return BadLine(line.number, line.custom_id, "mismatched_model", message, "model")
    try:
        jobs.jobs(line)
    except InvalidJob as error:
        return line.refused(error)
    return line
