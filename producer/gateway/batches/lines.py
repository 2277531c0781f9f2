"""The lines of a batch's file: each must be a request of OpenAI's batch format, and becomes one job.

The id and the seed of a job derive from the batch and the number of its line, so a line that is submitted again is the
same job.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import BinaryIO

from sluice.producer.contract.bulk.input import BadLine, Line, LineReader, lines
from sluice.producer.contract.bulk.jobs import NAME_BYTES, BulkSpec, LineJobs
from sluice.producer.contract.calls import NewJob, SourceLine
from sluice.producer.contract.jobs import Options, partition_of
from sluice.producer.contract.wire import JobId
from sluice.producer.errors import InvalidJob, InvalidSetting
from sluice.producer.gateway.batches.batch import Batch

MAX_ERRORS = 100
"""Bad lines that a batch lists."""

MAX_LINES = 1_000_000
Tick = Callable[[], None]
"""What is called for each line: it raises to end the work."""


@dataclass(frozen=True, slots=True)
class Names:
    """The custom ids of a file's lines, and their numbers in the file."""

    custom_ids: tuple[str, ...]
    numbers: tuple[int, ...] | None = None
    """None if they are 1, 2, 3 and so on."""

    def number(self, place: int) -> int:
        """Return the number of a line, by its place among those that are not blank."""
        return place + 1 if self.numbers is None else self.numbers[place]

    def encoded(self) -> bytes:
        """Encode them as JSON."""
        return json.dumps({"custom_ids": self.custom_ids, "numbers": self.numbers}, separators=(",", ":")).encode()


def names_of(data: bytes) -> Names:
    """Read what `Names.encoded` wrote.

    Raises:
        ValueError: it is something else, or was cut short.
    """
    try:
        found = json.loads(data)
        numbers = found["numbers"]
        return Names(tuple(found["custom_ids"]), None if numbers is None else tuple(numbers))
    except (KeyError, TypeError) as error:
        raise ValueError("these are no names") from error


@dataclass(frozen=True, slots=True)
class Checked:
    """A file that was read to its end."""

    names: Names
    model: str | None
    errors: tuple[BadLine, ...]
    """The first bad lines; none if all are valid."""


class LineJobsOfBatch:
    """The builder of the jobs of one batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._jobs = LineJobs(BulkSpec(queue=batch.queue, batch=batch.id, partitions=batch.partitions))
        self._reader = LineReader(endpoint=None, model=None, defaults=Options(tenant=batch.tenant), has_plain=False)

    def read(self, number: int, line: bytes | None) -> Line | BadLine:
        """Parse a line."""
        return self._reader.read(number, line)

    def job(self, line: Line) -> NewJob:
        """Build the job of a line.

        Raises:
            InvalidJob: the line has an invalid value.
        """
        source = SourceLine(custom_id=line.name, number=line.number, endpoint=line.endpoint)
        template = self._jobs.template(line.options)
        return template.new_job(line.prompt, lambda _digest: identity_of(self._batch, line.number), source)


def identity_of(batch: Batch, number: int) -> tuple[JobId, int]:
    """Return the id and the seed of the job of a line."""
    drawn = blake2b(f"{batch.id}\n{number}".encode(), digest_size=NAME_BYTES + 8).digest()
    name = drawn[:NAME_BYTES].hex()
    partition = partition_of(name, batch.partitions)
    return JobId(f"{partition}.{batch.tenant}.{name}"), int.from_bytes(drawn[NAME_BYTES:])


def check(batch: Batch, file: BinaryIO, tick: Tick) -> Checked:
    """Read a whole file and check every line."""
    jobs, model = LineJobsOfBatch(batch), _Model()
    custom_ids: list[str] = []
    numbers: list[int] = []
    errors: list[BadLine] = []
    try:
        for number, raw in lines(file):
            tick()
            found = _checked(batch, jobs, model, jobs.read(number, raw))
            if isinstance(found, BadLine):
                errors.append(found)
            else:
                custom_ids.append(found.name)
                numbers.append(number)
            if len(errors) >= MAX_ERRORS or len(custom_ids) > MAX_LINES:
                break
    except InvalidSetting as error:  # a line, or blank ones, without an end
        errors.append(BadLine(0, None, "invalid_file", str(error)))
    if len(custom_ids) > MAX_LINES:
        errors.append(BadLine(MAX_LINES + 1, None, "too_many_tasks", f"a batch has at most {MAX_LINES} requests"))
    if not custom_ids and not errors:
        errors.append(BadLine(1, None, "empty_file", "the file has no requests"))
    are_plain = numbers == list(range(1, len(numbers) + 1))
    return Checked(Names(tuple(custom_ids), None if are_plain else tuple(numbers)), model.name, tuple(errors))


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line of a checked file."""

    place: int
    """Among those that are not blank, from 0."""

    number: int
    data: bytes | None
    end: int
    """Bytes of the file up to its end."""

    def job(self, jobs: LineJobsOfBatch) -> tuple[str, NewJob]:
        """Return its custom id and its job."""
        line = jobs.read(self.number, self.data)
        assert isinstance(line, Line), "the file was checked, and its objects do not change"
        return line.name, jobs.job(line)


def lines_from(batch: Batch, names: Names, file: BinaryIO) -> Iterator[RawLine]:
    """Yield the lines of a checked file that the batch has not submitted."""
    first, num_before, num_skipped = batch.submitted, 0, batch.submitted
    if batch.file_offset:
        file.seek(batch.file_offset)
        num_before, num_skipped = names.number(first - 1), 0
    rest = islice(lines(file, after=num_before), num_skipped, None)
    for place, (number, data) in enumerate(rest, first):
        yield RawLine(place, number, data, file.tell())


class _Model:
    """The model that all lines of a file name. Changes with the first line."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._is_known = False

    def is_same(self, name: str | None) -> bool:
        """Return whether a line names the model of the first one."""
        if not self._is_known:
            self.name, self._is_known = name, True
        return name == self.name


def _checked(batch: Batch, jobs: LineJobsOfBatch, model: _Model, line: Line | BadLine) -> Line | BadLine:
    if isinstance(line, BadLine):
        return line
    if line.endpoint != batch.endpoint:
        message = f"the line's url is {line.endpoint}, and the batch's endpoint {batch.endpoint}"
        return BadLine(line.number, line.custom_id, "mismatched_url", message, "url")
    named = line.options.get("model")
    if not model.is_same(named):
        message = f"the line names model {named!r}, and the first line {model.name!r}: a batch has one model"
        return BadLine(line.number, line.custom_id, "mismatched_model", message, "body.model")
    try:
        jobs.job(line)
    except InvalidJob as error:
        return BadLine(line.number, line.custom_id, "invalid_request", str(error))
    return line
