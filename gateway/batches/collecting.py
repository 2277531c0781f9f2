"""Collect the outcomes of a batch's jobs into parts: objects with lines of the output and of the error file.

A part is written to the storage first. Then the database gets its key together with the bits of its lines, in one
transaction. So a task that is killed in between leaves an object that no row names, and the next one collects again.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from secrets import token_hex
from time import monotonic
from typing import BinaryIO

from sluice.gateway.batches.batch import BatchParts, StoredBatch
from sluice.gateway.batches.lines import Names, Tick, identity_of, request_in
from sluice.gateway.faults import ContentMissing
from sluice.gateway.files.storage import Storage
from sluice.gateway.files.store import Stored
from sluice.producer.bulk.output import error_line, line_of_many, output_line
from sluice.producer.bulk.recorded import RecordedOutcomes
from sluice.producer.client import Producer
from sluice.producer.errors import (
    HistoryUnavailable,
    JobCancelled,
    JobExpired,
    JobNotDone,
    JobNotFound,
    ResultExpired,
)
from sluice.producer.operations.results import Outcome
from sluice.protocol.bulk_files.journal import name_of
from sluice.protocol.openai_format.bodies import Object
from sluice.protocol.wire import JobId, JobResult

PART_LINES = 1000
PART_BYTES = 8 * 1024 * 1024
ASKED = 256
"""Jobs that are looked up at once."""

MISSING = {"code": "file_not_found", "message": "The input file, which has the request, is missing."}
LOST = {"code": "result_lost", "message": "The queue no longer has this request."}
UNSENT = {
    "expired": {"code": "batch_expired", "message": "This request could not be executed before it expired."},
    "cancelled": {"code": "batch_cancelled", "message": "This request was cancelled before it was executed."},
}


class Bits:
    """A set of places, stored as a bitmap. Changes as places are added."""

    def __init__(self, data: bytes | None, total: int) -> None:
        self._data = bytearray(data or bytes((total + 7) // 8))

    def add(self, place: int) -> None:
        """Add a place."""
        self._data[place >> 3] |= 1 << (place & 7)

    def __contains__(self, place: int) -> bool:
        """Return whether a place is in the set."""
        return bool(self._data[place >> 3] >> (place & 7) & 1)

    def missing(self, begin: int, end: int) -> Iterator[int]:
        """Yield the places in [begin, end) that are not in the set."""
        for at in range(begin >> 3, (end + 7) >> 3):
            if self._data[at] != 0xFF:
                for place in range(max(begin, at * 8), min(at * 8 + 8, end)):
                    if place not in self:
                        yield place

    def __bytes__(self) -> bytes:
        """Return the bitmap as it is stored."""
        return bytes(self._data)


@dataclass(slots=True, eq=False)
class Part:
    """Lines that are not written yet. Changes as lines are added."""

    places: list[int] = field(default_factory=list[int])
    output: list[str] = field(default_factory=list[str])
    error: list[str] = field(default_factory=list[str])
    num_bytes: int = 0
    num_expired: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the part must be written now."""
        return len(self.places) >= PART_LINES or self.num_bytes >= PART_BYTES

    def add(self, place: int, line: Object, *, is_done: bool) -> None:
        """Add the line of an outcome."""
        text = json.dumps(line, separators=(",", ":")) + "\n"
        (self.output if is_done else self.error).append(text)
        self.places.append(place)
        self.num_bytes += len(text)
        error = line["error"]
        self.num_expired += error is not None and error["code"] == UNSENT["expired"]["code"]

    def write(self, storage: Storage, batch: StoredBatch) -> BatchParts:
        """Write the part to the storage; return the parts of the batch with it.

        Raises:
            StorageUnavailable: the part cannot be written.
        """
        return BatchParts(
            batch.parts.output + _stored(storage, batch, "output", len(batch.parts.output), self.output),
            batch.parts.error + _stored(storage, batch, "error", len(batch.parts.error), self.error),
        )


def _stored(storage: Storage, batch: StoredBatch, kind: str, number: int, texts: Sequence[str]) -> tuple[Stored, ...]:
    if not texts:
        return ()
    # Random, so that a task that was considered dead cannot replace the part of its successor.
    key = f"{batch.folder}/{kind}-{number:05d}-{token_hex(6)}"
    data = "".join(texts).encode()
    storage.put(key, data)
    return (Stored(key=key, num_bytes=len(data), num_lines=len(texts)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSearch:
    """A search for ended jobs of a batch."""

    end: int
    """Place behind the last line that may have ended."""

    unsent: str | None = None
    """Error of lines that the queue does not know, a key of `UNSENT`; None: the queue had all of them."""

    most: int | None = None
    """Stop after this many ended jobs; None: no limit."""

    until_s: float
    """Stop at this time of the monotonic clock."""

    can_submit: bool = False
    """Whether lost lines can be submitted again."""

    is_last: bool = False
    """Whether lines that have not ended get the error `unsent`."""


class Collector:
    """The collection of one batch's outcomes. Changes as lines are collected.

    Args:
        producer: A client of the batch's queue.
        batch: The batch.
        names: The custom ids of its lines.
        recorded: The history, for results that the queue no longer has.
        opened: Opens the batch's file, from which requests of several jobs are read again.
    """

    def __init__(
        self,
        producer: Producer,
        batch: StoredBatch,
        names: Names,
        recorded: RecordedOutcomes,
        opened: Callable[[], AbstractContextManager[BinaryIO]],
    ) -> None:
        self._producer, self._batch, self._recorded = producer, batch, recorded
        self._opened = opened
        self.names = names
        self.bits = Bits(batch.collected, batch.total)
        self.place = batch.looked_at
        """Place at which the next search begins."""

    def ended(self, part: Part, tick: Tick, look: EndedSearch) -> int | None:
        """Add outcomes to a part until it is full, all lines have been looked up once, or time is up.

        Returns the place of the first line that the queue has lost and that must be submitted again, if any; lines
        behind it may be lost, too.

        Raises:
            HistoryUnavailable: an outcome may be in the history, which cannot be read now.
        """
        before = len(part.places)
        most = PART_LINES if look.most is None else look.most
        begin = self.place if self.place < look.end else 0
        waiting = chain(self.bits.missing(begin, look.end), self.bits.missing(0, begin))
        while not part.is_full and len(part.places) - before < most and (places := self._some(waiting)):
            tick()
            lost = self._look_at(part, places, look)
            self.place = places[-1] + 1
            if lost or monotonic() > look.until_s:
                return min(lost, default=None)
        return None

    @property
    def num_collected_jobs(self) -> int:
        """Number of jobs of the lines that are collected."""
        further = sum(many.num_jobs - 1 for place, many in self.names.many.items() if place in self.bits)
        return self._batch.num_collected + further

    def _some(self, places: Iterator[int]) -> list[int]:
        """Return the next places, whose jobs are about as many as are looked up at once."""
        found, num_jobs = list[int](), 0
        while num_jobs < ASKED and (place := next(places, None)) is not None:
            found.append(place)
            num_jobs += self.names.num_jobs(place)
        return found

    def add_refused(self, part: Part, refused: dict[int, Object]) -> None:
        """Add lines that the queue refused."""
        for place, line in refused.items():
            self._add(part, place, line, is_done=False)

    def _look_at(self, part: Part, places: Sequence[int], look: EndedSearch) -> list[int]:
        lost: list[int] = []
        of_several: dict[int, list[JobResult]] = {}
        by_place = {place: self._ids(place) for place in places}
        place_of = {job_id: place for place, job_ids in by_place.items() for job_id in job_ids}
        found: dict[int, dict[JobId, Outcome]] = {place: {} for place in places}
        for outcome in self._producer.results(place_of, is_waiting=False):
            of_line, place = found[place_of[outcome.job_id]], place_of[outcome.job_id]
            of_line[outcome.job_id] = outcome
            if len(of_line) < self.names.num_jobs(place):
                continue
            outcomes = [self._recorded_if_gone(place, of_line[job_id], look) for job_id in by_place.pop(place)]
            if look.can_submit and any(isinstance(outcome.error, JobNotFound) for outcome in outcomes):
                lost.append(place)
            elif place in self.names.many and (results := _results(outcomes)) is not None:
                of_several[place] = results
            else:
                self._add(part, place, *self._line(place, outcomes, look))
            del found[place]
        if of_several:
            self._add_of_several(part, dict(sorted(of_several.items())))
        if look.is_last and look.unsent is not None:
            for place, job_ids in by_place.items():
                self._add(
                    part, place, _unsent_line(job_ids[0], self.names.custom_ids[place], look.unsent), is_done=False
                )
        return lost

    def _ids(self, place: int) -> list[JobId]:
        number = self.names.number(place)
        return [identity_of(self._batch, number, index)[0] for index in range(self.names.num_jobs(place))]

    def _add(self, part: Part, place: int, line: Object, is_done: bool) -> None:
        part.add(place, line, is_done=is_done)
        self.bits.add(place)

    def _add_of_several(self, part: Part, results: Mapping[int, list[JobResult]]) -> None:
        """Add lines whose jobs are all done. Their requests are read in the order of the file, which is opened once."""
        left = deque(results)
        try:
            with self._opened() as file:
                while left:
                    self._add(part, left[0], *self._line_of_several(file, left[0], results[left[0]]))
                    left.popleft()
        except ContentMissing:
            for place in left:
                self._add(part, place, *self._without_request(place))

    def _recorded_if_gone(self, place: int, outcome: Outcome, look: EndedSearch) -> Outcome:
        """Return an outcome, from the history if the queue no longer has it."""
        # Lines that were never submitted are not looked up: a cancelled batch may have very many.
        was_sent = look.unsent is None or place < self._batch.submitted
        is_recorded = isinstance(outcome.error, ResultExpired) or (was_sent and isinstance(outcome.error, JobNotFound))
        if is_recorded:
            outcome = self._recorded.find(outcome.job_id) or outcome
            if self._recorded.problem is not None:
                raise HistoryUnavailable(self._recorded.problem)
        return outcome

    def _line(self, place: int, outcomes: Sequence[Outcome], look: EndedSearch) -> tuple[Object, bool]:
        """Return the line of a job, or of several that are not all done, and whether it has an answer."""
        custom_id, results = self.names.custom_ids[place], _results(outcomes)
        if results is not None:
            name = name_of(outcomes[0].job_id)
            return output_line(name, custom_id, self._batch.endpoint, results[0], model=self._batch.model), True
        failed = next(outcome for outcome in outcomes if outcome.error is not None or outcome.result is None)
        line = self._error_line(failed, custom_id, look)
        return {**line, "id": _line(outcomes[0].job_id, custom_id, LOST)["id"]}, False

    def _line_of_several(self, file: BinaryIO, place: int, results: Sequence[JobResult]) -> tuple[Object, bool]:
        batch, number = self._batch, self.names.number(place)
        request = request_in(batch, file, number, self.names.many[place].offset)
        if request is None:
            return self._without_request(place)
        name = name_of(self._ids(place)[0])
        return line_of_many(name, self.names.custom_ids[place], request, results, model=batch.model)

    def _without_request(self, place: int) -> tuple[Object, bool]:
        return _line(self._ids(place)[0], self.names.custom_ids[place], MISSING), False

    def _error_line(self, outcome: Outcome, custom_id: str, look: EndedSearch) -> Object:
        job_id, error = outcome.job_id, outcome.error
        # The jobs of a batch that is given up are cancelled.
        is_given_up = look.is_last and look.unsent == "expired" and isinstance(error, JobCancelled)
        if isinstance(error, JobExpired) or is_given_up:
            return _unsent_line(job_id, custom_id, "expired")
        if isinstance(error, JobNotDone):
            return error_line(name_of(job_id), custom_id, error, self._batch.endpoint)
        if isinstance(error, JobNotFound) and look.unsent is not None:
            return _unsent_line(job_id, custom_id, look.unsent)
        return _line(job_id, custom_id, LOST)


def _results(outcomes: Sequence[Outcome]) -> list[JobResult] | None:
    """Return the results of a line's jobs; None if one of them has none."""
    done = [outcome.result for outcome in outcomes if outcome.error is None and outcome.result is not None]
    return done if len(done) == len(outcomes) else None


def _unsent_line(job_id: JobId, custom_id: str, why: str) -> Object:
    return _line(job_id, custom_id, UNSENT[why])


def _line(job_id: JobId, custom_id: str, error: Object) -> Object:
    return {"id": f"batch_req_{name_of(job_id)}", "custom_id": custom_id, "response": None, "error": error}
