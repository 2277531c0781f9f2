"""Continue a batch as far as possible now: check its file, submit its lines, collect outcomes, finish it.

A task works for some seconds and stores its progress in the database, so it may be killed at any point: the next task
continues from there. While the file is checked, the task enforces the batch's deadline; then the queue's timer does.
"""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from secrets import token_hex
from time import monotonic
from typing import Any, BinaryIO, Self

from sluice.gateway.batches.batch import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    BatchParts,
    StoredBatch,
    error_of_line,
    printable,
)
from sluice.gateway.batches.collecting import PART_LINES, Collector, EndedSearch, Part
from sluice.gateway.batches.hold import Hold
from sluice.gateway.batches.lines import FileCheck, Names, Tick, names_of
from sluice.gateway.batches.store import BatchLost, BatchStore
from sluice.gateway.batches.submitting import Submission, Submitted
from sluice.gateway.faults import ContentMissing, StorageUnavailable
from sluice.gateway.files.storage import Storage
from sluice.gateway.files.store import OUTPUT, File, FileStore, Stored, new_file_id
from sluice.gateway.tables.database import Database
from sluice.producer.bulk.recorded import RecordedOutcomes
from sluice.producer.client import Producer
from sluice.producer.errors import BatchNotFound
from sluice.producer.operations.operation import Operation
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import SLICES_PER_TRIP, ask_calls
from sluice.protocol import calls
from sluice.protocol.clock import wall_ms
from sluice.protocol.openai_format.bodies import Object

SLICE_S = 1.0
"""How long a task works after it has read the stored progress; then other tenants' batches have their turn."""

WORK_PER_READ = 1.0
"""Least ratio of work to reading: with a slow storage, too, half of the time is spent on work."""

MAX_WORK_S = 10.0

PATIENCE_S = 5.0
PART_MS = 30_000
"""Most time, about, until ended requests are written to a part that is not full."""

CLOCKS_MS = 60_000
"""Greatest difference that is expected between the clocks of the queue's server and of this host."""

OVERDUE_MS = 300_000
"""How long an expired or cancelled batch waits for running jobs. Then it ends without them: their worker may be dead,
with no other worker to detect it."""

MIN_PAUSE_MS, MAX_PAUSE_MS = 500, 5000
"""A batch that waits for its jobs is looked at again after a twentieth of its age, within these bounds."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """The resources of a task. Leaving the context closes them."""

    redis_url: str = field(repr=False)
    database_url: str = field(repr=False)
    storage: Storage
    database: Database

    @classmethod
    def open(cls, redis_url: str, database_url: str, files_url: str) -> Self:
        """Open the resources; they connect at the first use.

        Raises:
            HistoryUnavailable, InvalidSetting: a URL is wrong.
        """
        return cls(redis_url, database_url, Storage(files_url), Database(database_url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.database.close()

    @property
    def batches(self) -> BatchStore:
        """The table of batches."""
        return BatchStore(self.database)

    @property
    def files(self) -> FileStore:
        """The table of files."""
        return FileStore(self.database)


def advance(workshop: Workshop, batch_id: str, epoch: int) -> None:
    """Continue a batch, unless another task has it.

    Raises:
        ProducerError: the queue, the database or the storage is unreachable. The batch is continued later.
    """
    batch = workshop.batches.take(batch_id, epoch)
    if batch is None:
        return
    pause_ms = 0
    # Lost: it was cancelled, and another task ends it at once; or another task has it already.
    with suppress(BatchLost), Hold(workshop.batches, batch) as hold:
        pause_ms = _Run(workshop, batch, hold.check).advance()
    workshop.batches.release(batch, pause_ms)


class _Run:
    """The work of one task on its batch. Changes as the batch does."""

    def __init__(self, workshop: Workshop, batch: StoredBatch, tick: Tick) -> None:
        self._workshop, self._batch, self._tick = workshop, batch, tick
        self._storage, self._batches = workshop.storage, workshop.batches
        self._until_s = monotonic()
        self._num_ended = 0

    def advance(self) -> int:
        """Continue until there is nothing to do or time is up; return the pause until the next task, in ms.

        Raises:
            BatchLost: another task has the batch, or its status has changed.
            ProducerError: as `advance`.
        """
        if self._batch.status == VALIDATING and not self._is_late and not self._validate():
            return 0
        if self._batch.status == FAILED or self._is_over_without_jobs():
            return 0
        batch, began_s = self._batch, monotonic()
        with (
            # Without the batch's number of partitions, which only the ids of its jobs need: the workers may have
            # changed theirs since.
            Producer(self._workshop.redis_url, queue=batch.queue, patience_s=PATIENCE_S) as producer,
            RecordedOutcomes(self._workshop.database_url, batch.queue) as recorded,
        ):
            producer.target.partitions = batch.partitions  # while no worker has stated one
            names = self._names(producer)
            if names is None:
                return 0
            collector = Collector(producer, self._batch, names, recorded, self._input)
            self._until_s = monotonic() + _work_s(began_s)
            while self._step(producer, collector):
                if monotonic() > self._until_s:
                    return 0
        return min(MAX_PAUSE_MS, MIN_PAUSE_MS + (wall_ms() - batch.created_ms) // 20)

    # ------------------------------------------------------------ checking the file

    def _validate(self) -> bool:
        """Check a slice of the file; return whether it was the last one, so that the batch has its next status."""
        began_s = monotonic()
        check = self._check()
        try:
            with self._input() as file:
                is_over = check.run(file, self._tick, _work_s(began_s))
        except ContentMissing:
            self._fail({"code": "file_not_found", "line": None, "message": "the input file is missing", "param": None})
            return True
        if is_over:
            self._end_check(check)
        else:
            self._keep_slice(check)
        return is_over

    def _check(self) -> FileCheck:
        """Return the check as far as it was done; start again if stored results are lost."""
        with suppress(ContentMissing, ValueError):
            return FileCheck(self._batch, [self._storage.get(part.key) for part in self._batch.parts.checked])
        self._batch = self._batches.change(self._batch, parts=BatchParts())
        return FileCheck(self._batch)

    def _keep_slice(self, check: FileCheck) -> None:
        """Store a slice, merged with those before it that are not larger, so that the number of objects stays small."""
        kept = [*self._batch.parts.checked]
        while kept and kept[-1].num_lines <= check.num_lines(since=len(kept)):
            kept.pop()
        since = len(kept)
        data, replaced = check.new_lines(since), self._batch.parts.checked[since:]
        # Random, as the keys of parts are.
        key = f"{self._batch.folder}/checked-{since:05d}-{token_hex(6)}"
        self._storage.put(key, data)
        new = Stored(key=key, num_bytes=len(data), num_lines=check.num_lines(since))
        self._batch = self._batches.change(self._batch, parts=BatchParts(checked=(*kept, new)))
        self._delete(*(part.key for part in replaced))

    def _end_check(self, check: FileCheck) -> None:
        batch, model = self._batch, check.model and printable(check.model)
        if check.errors:
            self._fail(*map(error_of_line, check.errors))
        elif model != batch.model:
            message = f"the lines name model {model!r}, and the batch was created for {batch.model!r}"
            self._fail({"code": "mismatched_model", "line": 1, "message": message, "param": "body.model"})
        else:
            names = check.names
            total, key = len(names.custom_ids), self._put_names(names)
            self._batch = self._batches.move(batch, IN_PROGRESS, total=total, names=key, parts=BatchParts())
        self._delete(*(part.key for part in batch.parts.checked))

    def _fail(self, *errors: Object) -> None:
        self._batch = self._batches.move(self._batch, FAILED, errors=list(errors), parts=BatchParts())

    def _delete(self, *keys: str) -> None:
        """Delete objects that are no longer needed."""
        with suppress(StorageUnavailable):  # a sweep deletes them
            self._storage.delete(list(keys))

    def _put_names(self, names: Names) -> str:
        # Random, as the keys of parts are.
        key = f"{self._batch.folder}/names-{token_hex(6)}"
        self._storage.put(key, names.encoded())
        return key

    def _names(self, producer: Producer) -> Names | None:
        """Read the custom ids, from the file if they are lost; return None if the batch was ended without them.

        Raises:
            StorageUnavailable: neither can be read now.
        """
        batch = self._batch
        assert batch.names is not None, "a batch with lines has their names"
        with suppress(ContentMissing, ValueError):
            return names_of(self._storage.get(batch.names))
        try:
            names = self._names_in_file()
        except ContentMissing:
            if self._why_unsent is None:
                raise
            self._end_without_names(producer)
            return None
        self._batch = self._batches.change(batch, names=self._put_names(names))
        return names

    def _names_in_file(self) -> Names:
        check = FileCheck(self._batch)
        with self._input() as file:
            check.run(file, self._tick)
        names = check.names
        if len(names.custom_ids) != self._batch.total:
            raise ContentMissing("the input file has changed since the batch was created")
        return names

    def _end_without_names(self, producer: Producer) -> None:
        """End a batch whose custom ids are lost, with the outcomes that it has."""
        with suppress(BatchNotFound):
            producer.cancel_batch(self._batch.id, reason="the input file of the batch is missing")
        error = {"code": "file_not_found", "line": None, "message": "the input file is missing", "param": None}
        self._batch = self._batches.change(self._batch, errors=[error])
        self._finish()

    @contextmanager
    def _input(self) -> Generator[BinaryIO]:
        file = self._workshop.files.get(self._batch.input_file, self._batch.tenant)
        if file is None:
            raise ContentMissing("the input file was deleted")
        with self._storage.reading(file.objects[0].key) as opened:
            yield opened

    def _is_over_without_jobs(self) -> bool:
        """Finish a batch that was cancelled or expired before its file was checked; return whether it was."""
        if self._batch.total:
            return False
        self._batches.move(self._batch, CANCELLED if self._batch.status == CANCELLING else EXPIRED)
        return True

    @property
    def _is_late(self) -> bool:
        return wall_ms() >= self._batch.expires_ms

    @property
    def _why_unsent(self) -> str | None:
        """Error of lines that will not be submitted any more, a key of `UNSENT`; None while lines are submitted."""
        if self._batch.status == CANCELLING:
            return "cancelled"
        return "expired" if self._is_late else None

    @property
    def _is_overdue(self) -> bool:
        """Whether the batch ends without the jobs that still run."""
        since_ms = self._batch.times.get(CANCELLING, self._batch.expires_ms)
        return self._why_unsent is not None and wall_ms() >= since_ms + OVERDUE_MS

    # ------------------------------------------------------------ running it

    def _step(self, producer: Producer, collector: Collector) -> bool:
        """Submit lines while there is room, and collect a part; return whether to continue at once."""
        self._tick()
        part = Part()
        sent = self._send(producer, collector)
        collector.add_refused(part, sent.refused)
        state = self._state(producer.batch(self._batch.id), sent, collector.names)
        if state.is_to_be_closed:
            with suppress(BatchNotFound):  # it has no jobs: the queue refused all lines
                producer.close_batch(self._batch.id)
        if state.is_over and self._batch.status == IN_PROGRESS:
            self._batch = self._batches.move(self._batch, FINALIZING)
        if state.is_over or not state.is_whole or self._is_part_due(self._num_new(state.view.ended, collector)):
            lost = collector.ended(part, self._tick, self._look(state, sent, collector))
            if lost is not None:
                sent.go_back(lost)
        has_moved = bool(part.places) or sent.end != self._batch.submitted or state.view.ended > self._num_ended
        self._num_ended = state.view.ended
        self._keep(part, collector, sent, state.view)
        if self._batch.num_collected == self._batch.total:
            self._finish()
            return False
        return has_moved

    def _state(self, view: calls.BatchView, sent: Submitted, names: Names) -> "_State":
        batch, why_unsent = self._batch, self._why_unsent
        if sent.is_closed:
            why_unsent = "expired" if wall_ms() + CLOCKS_MS >= batch.expires_ms else "cancelled"
        num_taken = names.num_jobs_before(sent.end) - batch.refused - sent.num_refused
        return _State(
            view=view,
            why_unsent=why_unsent,
            is_sent=why_unsent is not None or sent.end == batch.total,
            is_whole=why_unsent is not None or view.is_closed or view.total >= num_taken,
            is_overdue=self._is_overdue,
        )

    def _look(self, state: "_State", sent: Submitted, collector: Collector) -> EndedSearch:
        is_any = state.is_over or not state.is_whole
        return EndedSearch(
            end=self._batch.total if state.is_over else sent.end,
            unsent=state.why_unsent,
            most=None if is_any else self._num_new(state.view.ended, collector),
            until_s=self._until_s,
            can_submit=state.can_submit,
            is_last=state.is_overdue,
        )

    def _send(self, producer: Producer, collector: Collector) -> Submitted:
        batch = self._batch
        if batch.status == CANCELLING or self._is_overdue:
            with suppress(BatchNotFound):
                producer.cancel_batch(batch.id, reason="the batch was cancelled")
        elif self._is_late:
            # Workers fire timers; without a worker, nothing else would.
            producer.run(_maintain(producer.target))
        elif batch.submitted < batch.total:
            producer.expire_batch(batch.id, batch.deadline, is_new=True)
            submission = Submission(batch, collector.names, collector.bits, self._tick, self._until_s)
            with self._input() as file:
                return submission.run(producer, file)
        return Submitted.of(batch)

    def _is_part_due(self, num_new: int) -> bool:
        batch = self._batch
        since_ms = wall_ms() - (batch.written_ms or batch.times[IN_PROGRESS])
        return num_new >= PART_LINES or (num_new > 0 and since_ms > PART_MS)

    def _num_new(self, num_ended: int, collector: Collector) -> int:
        """Return the number of ended jobs whose outcomes are not collected yet."""
        return num_ended - (collector.num_collected_jobs - self._batch.refused)

    def _keep(self, part: Part, collector: Collector, sent: Submitted, view: calls.BatchView) -> None:
        """Write a part and the progress of the batch."""
        batch = self._batch
        refused = batch.refused + sent.num_refused
        fields: dict[str, object] = {"looked_at": collector.place, **_progress(view, refused, part, collector, batch)}
        fields |= {"submitted": sent.end, "file_offset": sent.file_offset}
        if part.places:
            fields["parts"] = part.write(self._storage, batch)
            fields["collected"] = bytes(collector.bits)
            fields["expired"] = batch.expired + part.num_expired
            fields |= {"refused": refused, "written_ms": wall_ms()}
        # Any: each is as its field says
        changes: dict[str, Any] = {name: value for name, value in fields.items() if value != getattr(batch, name)}
        if changes:
            self._batch = self._batches.change(batch, **changes)

    def _finish(self) -> None:
        """Create the files of a batch and set its final status, in one transaction."""
        if self._batch.status == IN_PROGRESS:
            self._batch = self._batches.move(self._batch, FINALIZING)
        batch = self._batch
        status = EXPIRED if batch.expired or batch.num_collected < batch.total else COMPLETED
        if batch.status == CANCELLING:
            status = CANCELLED
        output, error = (
            self._file(kind, parts) for kind, parts in (("output", batch.parts.output), ("error", batch.parts.error))
        )
        self._batches.move(
            batch,
            status,
            new_files=[file for file in (output, error) if file is not None],
            output_file=output and output.id,
            error_file=error and error.id,
            completed=batch.parts.num_done,
            failed=batch.total - batch.parts.num_done,
        )
        if batch.names is not None:
            self._delete(batch.names)

    def _file(self, kind: str, parts: tuple[Stored, ...]) -> File | None:
        if not parts:
            return None
        created_ms = wall_ms()
        return File(
            id=new_file_id(created_ms),
            tenant=self._batch.tenant,
            purpose=OUTPUT,
            filename=f"{self._batch.id}_{kind}.jsonl",
            objects=parts,
            created_ms=created_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The queue's view of a batch."""

    view: calls.BatchView
    why_unsent: str | None
    """Error of lines that will not be submitted any more, a key of `UNSENT`; None while lines are submitted."""

    is_sent: bool
    """Whether no more lines will be submitted."""

    is_whole: bool
    """Whether the queue has all lines that it accepted; otherwise its server was restored without the last ones."""

    is_overdue: bool

    @property
    def is_to_be_closed(self) -> bool:
        """Whether the queue's batch must be closed because no more jobs follow."""
        return self.is_sent and self.is_whole and not self.view.is_closed

    @property
    def is_over(self) -> bool:
        """Whether all jobs of the batch have ended, or it ends without those that still run."""
        return self.is_overdue or (self.is_sent and self.is_whole and self.view.ended >= self.view.total)

    @property
    def can_submit(self) -> bool:
        """Whether lost lines can be submitted again."""
        return self.why_unsent is None and not self.view.is_closed and not self.is_to_be_closed


def _progress(
    view: calls.BatchView, num_refused: int, part: Part, collector: Collector, batch: StoredBatch
) -> dict[str, int]:
    """Return how many requests are done and how many failed: of requests of several jobs, those that are collected."""
    if collector.names.many:
        return {
            "completed": batch.parts.num_done + len(part.output),
            "failed": batch.parts.num_failed + len(part.error),
        }
    return {"completed": view.done, "failed": view.failed + view.cancelled + view.expired + num_refused}


def _work_s(began_s: float) -> float:
    """Return how long to work after reading that began at this time of the monotonic clock, in seconds."""
    return max(SLICE_S, min(MAX_WORK_S, WORK_PER_READ * (monotonic() - began_s)))


def _maintain(queue: Queue) -> Operation[None]:
    """Fire due timers; each call fires a slice of them."""
    for keys in (yield from queue.all_keys()):
        yield from ask_calls([calls.maintain(keys, number=at) for at in range(SLICES_PER_TRIP)])
