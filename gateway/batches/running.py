"""Submit the lines of a batch whose file is checked, collect their outcomes, and write both to its row, in steps."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sluice.gateway.batches.batch import CANCELLING, FINALIZING, IN_PROGRESS, StoredBatch
from sluice.gateway.batches.collecting import PART_LINES, Collector, EndedSearch, Part
from sluice.gateway.batches.finishing import finish
from sluice.gateway.batches.submitting import Submission, Submitted
from sluice.gateway.batches.taken import TakenBatch
from sluice.producer.client import Producer
from sluice.producer.errors import BatchNotFound
from sluice.producer.operations.operation import Operation
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import SLICES_PER_TRIP, ask_calls
from sluice.protocol import calls
from sluice.protocol.clock import wall_ms

PART_MS = 30_000
"""Most time, about, until ended requests are written to a part that is not full."""

CLOCKS_MS = 60_000
"""Greatest difference that is expected between the clocks of the queue's server and of this host."""


class Run:
    """The work on a batch whose file is checked. Changes with each step.

    Args:
        taken: The batch.
        producer: A client of its queue.
        collector: Collects its outcomes.
        until_s: When the time of the task is over, on the monotonic clock.
    """

    def __init__(self, taken: TakenBatch, producer: Producer, collector: Collector, until_s: float) -> None:
        self._taken, self._producer, self._collector, self._until_s = taken, producer, collector, until_s
        self._num_ended = 0

    def step(self) -> bool:
        """Submit lines while there is room, and collect a part; return whether to continue at once.

        Raises:
            BatchLost: another task has the batch, or its status has changed.
            ProducerError: the queue, the database or the storage is unreachable.
        """
        taken, producer, collector = self._taken, self._producer, self._collector
        taken.tick()
        part = Part()
        sent = self._send()
        collector.add_refused(part, sent.refused)
        state = self._state(producer.batch(taken.row.id), sent)
        if state.is_to_be_closed:
            with suppress(BatchNotFound):  # it has no jobs: the queue refused all lines
                producer.close_batch(taken.row.id)
        if state.is_over and taken.row.status == IN_PROGRESS:
            taken.move(FINALIZING)
        if state.is_over or not state.is_whole or self._is_part_due(self._num_new(state.view.ended)):
            lost = collector.ended(part, taken.tick, self._look(state, sent))
            if lost is not None:
                sent.go_back(lost)
        has_moved = bool(part.places) or sent.end != taken.row.submitted or state.view.ended > self._num_ended
        self._num_ended = state.view.ended
        self._keep(part, sent, state.view)
        if taken.row.num_collected == taken.row.total:
            finish(taken)
            return False
        return has_moved

    def _send(self) -> Submitted:
        taken, row, producer = self._taken, self._taken.row, self._producer
        if row.status == CANCELLING or taken.is_overdue:
            with suppress(BatchNotFound):
                producer.cancel_batch(row.id, reason="the batch was cancelled")
        elif taken.is_late:
            # Workers fire timers; without a worker, nothing else would.
            producer.run(_maintain(producer.target))
        elif row.submitted < row.total:
            producer.expire_batch(row.id, row.deadline, is_new=True)
            submission = Submission(row, self._collector.names, self._collector.bits, taken.tick, self._until_s)
            with taken.input() as file:
                return submission.run(producer, file)
        return Submitted.of(row)

    def _state(self, view: calls.BatchView, sent: Submitted) -> "_State":
        row, why_unsent = self._taken.row, self._taken.why_unsent
        if sent.is_closed:
            why_unsent = "expired" if wall_ms() + CLOCKS_MS >= row.expires_ms else "cancelled"
        num_taken = self._collector.names.num_jobs_before(sent.end) - row.refused - sent.num_refused
        return _State(
            view=view,
            why_unsent=why_unsent,
            is_sent=why_unsent is not None or sent.end == row.total,
            is_whole=why_unsent is not None or view.is_closed or view.total >= num_taken,
            is_overdue=self._taken.is_overdue,
        )

    def _look(self, state: "_State", sent: Submitted) -> EndedSearch:
        is_any = state.is_over or not state.is_whole
        return EndedSearch(
            end=self._taken.row.total if state.is_over else sent.end,
            unsent=state.why_unsent,
            most=None if is_any else self._num_new(state.view.ended),
            until_s=self._until_s,
            can_submit=state.can_submit,
            is_last=state.is_overdue,
        )

    def _is_part_due(self, num_new: int) -> bool:
        row = self._taken.row
        since_ms = wall_ms() - (row.written_ms or row.times[IN_PROGRESS])
        return num_new >= PART_LINES or (num_new > 0 and since_ms > PART_MS)

    def _num_new(self, num_ended: int) -> int:
        """Return the number of ended jobs whose outcomes are not collected yet."""
        return num_ended - (self._collector.num_collected_jobs - self._taken.row.refused)

    def _keep(self, part: Part, sent: Submitted, view: calls.BatchView) -> None:
        """Write a part and the progress of the batch."""
        row, collector = self._taken.row, self._collector
        refused = row.refused + sent.num_refused
        fields: dict[str, object] = {"looked_at": collector.place, **_progress(view, refused, part, collector, row)}
        fields |= {"submitted": sent.end, "file_offset": sent.file_offset}
        if part.places:
            fields["parts"] = part.write(self._taken.workshop.storage, row)
            fields["collected"] = bytes(collector.bits)
            fields["expired"] = row.expired + part.num_expired
            fields |= {"refused": refused, "written_ms": wall_ms()}
        # Any: each is as its field says
        changes: dict[str, Any] = {name: value for name, value in fields.items() if value != getattr(row, name)}
        if changes:
            self._taken.change(**changes)


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


def _maintain(queue: Queue) -> Operation[None]:
    """Fire due timers; each call fires a slice of them."""
    for keys in (yield from queue.all_keys()):
        yield from ask_calls([calls.maintain(keys, number=at) for at in range(SLICES_PER_TRIP)])
