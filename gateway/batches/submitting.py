"""Submit the lines of a batch, from the place on that the batch has reached."""

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
"""How long lines are submitted from the first one on, also if time was up before: some are in each run."""


@dataclass(slots=True, eq=False)
class Submitted:
    """What became of some lines. Changes with each answer."""

    end: int
    """Place of the first line that the queue has not answered for."""

    file_offset: int
    """Bytes of the file before it; 0: unknown."""

    refused: dict[int, Object] = field(default_factory=dict[int, Object])
    """Lines of the error file for requests that the queue refuses for good, by their place."""

    is_full: bool = False
    is_closed: bool = False
    """The queue's batch accepts no more: its deadline has passed, or it was cancelled there."""

    @classmethod
    def of(cls, batch: StoredBatch) -> "Submitted":
        """Return what a batch has reached."""
        return cls(batch.submitted, batch.file_offset)

    @property
    def is_over(self) -> bool:
        """Whether the queue takes no more now."""
        return self.is_full or self.is_closed

    def go_back(self, place: int) -> None:
        """Note that a line is to be submitted again, and maybe some behind it."""
        self.end, self.file_offset = place, 0

    def go_behind(self, line: RawLine) -> None:
        """Note that a line is finished."""
        self.end, self.file_offset = line.place + 1, line.end


class Submission:
    """One run over a file. Changes with each answer.

    Args:
        batch: The batch.
        names: Its custom ids.
        collected: Places of lines that have an outcome: they are not submitted.
        tick: Called for each line.
        until_s: When to stop, by the monotonic clock.
    """

    def __init__(self, batch: StoredBatch, names: Names, collected: Bits, tick: Tick, until_s: float) -> None:
        self._batch, self._names, self._collected = batch, names, collected
        self._tick, self._until_s = tick, until_s
        self._pending: deque[tuple[RawLine, NewJob | BadLine]] = deque()
        """Lines that were read and have no outcome here yet, in order."""

        self._found = Submitted.of(batch)
        self._skipped: RawLine | None = None

    def run(self, producer: Producer, file: BinaryIO) -> Submitted:
        """Submit what there is room and time for.

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
            job = line.job(jobs)
            self._skipped = None
            self._pending.append((line, job))
            if not isinstance(job, BadLine):
                yield job, True

    def _refuse_bad(self) -> None:
        """Refuse the bad lines before the next job, unless all wait: then they are read again with those."""
        while self._pending and isinstance(bad := self._pending[0][1], BadLine):
            line, _ = self._pending.popleft()
            if not self._found.is_over:
                name = name_of(identity_of(self._batch, line.number)[0])
                self._found.refused[line.place] = bad_line(name, replace(bad, custom_id=self._custom_id(line)))
                self._found.go_behind(line)

    def _custom_id(self, line: RawLine) -> str:
        return self._names.custom_ids[line.place]

    def _note(self, answer: object) -> None:
        self._refuse_bad()
        line, job = self._pending.popleft()
        assert not isinstance(job, BadLine), "those are refused"
        if isinstance(answer, QueueFull):
            self._found.is_full = True
        elif isinstance(answer, BatchClosed):
            self._found.is_closed = True
        elif isinstance(answer, InvalidJob | IdempotencyConflict):
            self._found.refused[line.place] = error_line(
                name_of(job.id), self._custom_id(line), answer, self._batch.endpoint
            )
        elif isinstance(answer, ProducerError):
            raise answer
        # After the first job that has to wait, all wait: what the queue took of them, it knows when they come again.
        if not self._found.is_over:
            self._found.go_behind(line)
