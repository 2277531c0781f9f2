"""Submit the lines of a batch, from its first unsubmitted line on."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import BinaryIO

from sluice.gateway.batches.batch import StoredBatch
from sluice.gateway.batches.collecting import Bits
from sluice.gateway.batches.lines import LineJobsOfBatch, Names, RawLine, Tick, identity_of, lines_from
from sluice.producer.bulk.output import bad_line, error_line
from sluice.producer.client import Producer
from sluice.producer.errors import BatchClosed, IdempotencyConflict, InvalidJob, ProducerError, QueueFull
from sluice.protocol.bulk_files.input import BadLine
from sluice.protocol.bulk_files.journal import name_of
from sluice.protocol.calls import NewJob
from sluice.protocol.jobs import Prepared
from sluice.protocol.openai_format.bodies import Object

LEAST_S = 2.0
"""Least time for which each run submits lines, from its first line on, so that every run makes progress."""


@dataclass(slots=True, eq=False)
class Submitted:
    """Progress of a submission. Changes with each answer of the queue."""

    end: int
    """Place of the first line without an answer."""

    file_offset: int
    """Offset of that line in the file, in bytes; 0: unknown."""

    refused: dict[int, Object] = field(default_factory=dict[int, Object])
    """Lines of the error file for requests that the queue refused for good, by their place."""

    num_refused: int = 0
    """Jobs that it refused for good."""

    is_full: bool = False
    is_closed: bool = False
    """The queue's batch accepts no more: its deadline has passed, or it was cancelled there."""

    @classmethod
    def of(cls, batch: StoredBatch) -> "Submitted":
        """Return the progress that a batch has stored."""
        return cls(batch.submitted, batch.file_offset)

    @property
    def is_over(self) -> bool:
        """Whether the queue accepts no more jobs now."""
        return self.is_full or self.is_closed

    def go_back(self, place: int) -> None:
        """Continue from this line again: it is lost, and lines behind it may be, too."""
        self.end, self.file_offset = place, 0

    def go_behind(self, line: RawLine) -> None:
        """Continue behind this line."""
        self.end, self.file_offset = line.place + 1, line.end


class Submission:
    """One run over a file. Changes with each answer of the queue.

    Args:
        batch: The batch.
        names: The custom ids of its lines.
        collected: Places of lines that have an outcome already and are not submitted.
        tick: Called for each line.
        until_s: When to stop, by the monotonic clock.
    """

    def __init__(self, batch: StoredBatch, names: Names, collected: Bits, tick: Tick, until_s: float) -> None:
        self._batch, self._names, self._collected = batch, names, collected
        self._tick, self._until_s = tick, until_s
        self._pending: deque[tuple[RawLine, NewJob | BadLine, bool]] = deque()
        """Jobs of lines that wait for an answer, in order, and whether each is the last of its line."""

        self._num_refused = 0
        """Jobs of the present line that the queue refused."""

        self._found = Submitted.of(batch)
        self._skipped: RawLine | None = None

    def run(self, producer: Producer, file: BinaryIO) -> Submitted:
        """Submit lines while there is room in the queue and time.

        Raises:
            QueueUnreachable, QueueRefused, LessDurable: the queue does not accept jobs now; try again later.
        """
        for answer in producer.submit_prepared(self._feed(file)):
            self._note(answer)
        self._refuse_bad()
        if self._skipped is not None and not self._found.is_over:
            self._found.go_behind(self._skipped)
        return self._found

    def _feed(self, file: BinaryIO) -> Iterator[Prepared]:
        jobs, until_s = LineJobsOfBatch(self._batch), None
        for line in lines_from(self._batch, self._names, file):
            self._tick()
            until_s = until_s or max(self._until_s, monotonic() + LEAST_S)
            if self._found.is_over or monotonic() > until_s:
                return
            if line.place in self._collected:
                self._skipped = line
                continue
            made = line.jobs(jobs)
            self._skipped = None
            if isinstance(made, BadLine):
                self._pending.append((line, made, True))
                continue
            for index, job in enumerate(made, 1):
                self._pending.append((line, job, index == len(made)))
                yield job, True

    def _refuse_bad(self) -> None:
        """Refuse the invalid lines before the next job, unless the run is over: then the next run reads them again."""
        while self._pending and isinstance(bad := self._pending[0][1], BadLine):
            line, _, _ = self._pending.popleft()
            if not self._found.is_over:
                self._found.num_refused += self._names.num_jobs(line.place)
                name = name_of(identity_of(self._batch, line.number)[0])
                self._found.refused[line.place] = bad_line(name, replace(bad, custom_id=self._custom_id(line)))
                self._found.go_behind(line)

    def _custom_id(self, line: RawLine) -> str:
        return self._names.custom_ids[line.place]

    def _note(self, answer: object) -> None:
        self._refuse_bad()
        line, job, is_last = self._pending.popleft()
        assert not isinstance(job, BadLine), "those are refused"
        if isinstance(answer, QueueFull):
            self._found.is_full = True
        elif isinstance(answer, BatchClosed):
            self._found.is_closed = True
        elif isinstance(answer, InvalidJob | IdempotencyConflict):
            self._num_refused += 1
            name = name_of(identity_of(self._batch, line.number)[0])
            refused = error_line(name, self._custom_id(line), answer, self._batch.endpoint)
            self._found.refused.setdefault(line.place, refused)
        elif isinstance(answer, ProducerError):
            raise answer
        # Once a job has to wait, the next run submits it and all behind it again; the queue recognises those it has.
        if is_last:
            self._end_line(line)

    def _end_line(self, line: RawLine) -> None:
        if self._found.is_over:
            self._found.refused.pop(line.place, None)
        else:
            self._found.num_refused += self._num_refused
            self._found.go_behind(line)
        self._num_refused = 0
