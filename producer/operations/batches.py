"""Inspect, close, cancel and expire batches. No I/O.

A batch is cancelled in slices of at most 32 jobs, so that no script blocks the server for long. Several slices share
one round trip.
"""

from dataclasses import dataclass

from sluice.producer.errors import BatchNotFound, InvalidJob
from sluice.producer.operations.operation import Operation
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import SLICES_PER_TRIP, ask_calls
from sluice.protocol import calls
from sluice.protocol.callback_urls import problem_of
from sluice.protocol.calls import BatchView
from sluice.protocol.jobs import Moment, moment_ms


def batch(queue: Queue, name: str) -> Operation[BatchView]:
    """Read the totals of a batch over all partitions."""
    inspections = [calls.inspect_batch(keys, name) for keys in (yield from queue.all_keys())]
    return calls.join_batch((yield from ask_calls(inspections)))


def known_batch(queue: Queue, name: str) -> Operation[BatchView]:
    """Read the totals of a batch that must have jobs.

    Raises:
        BatchNotFound: the batch has no jobs.
    """
    view = yield from batch(queue, name)
    if not view.total:
        raise BatchNotFound(name)
    return view


def close_batch(queue: Queue, name: str, callback_url: str | None) -> Operation[BatchView]:
    """Close a batch: it accepts no more jobs, and its callback is sent when all of them have ended.

    Raises:
        BatchNotFound: the batch has no jobs.
        InvalidJob: the URL is not valid.
    """
    if callback_url is not None and (problem := problem_of(callback_url)):
        raise InvalidJob(f"callback_url {problem}")
    yield from known_batch(queue, name)
    closings = [calls.close_batch(keys, name, callback_url=callback_url) for keys in (yield from queue.all_keys())]
    return calls.join_batch((yield from ask_calls(closings)))


@dataclass(frozen=True, slots=True)
class BatchCancelled:
    """The result of cancelling a batch."""

    num_ended: int
    """Number of waiting jobs that have ended."""

    num_asked: int
    """Number of running jobs that were asked to stop."""


def cancel_batch(queue: Queue, name: str, reason: str | None) -> Operation[BatchCancelled]:
    """Close a batch and cancel all its unfinished jobs.

    Raises:
        BatchNotFound: the batch has no jobs.
    """
    yield from known_batch(queue, name)
    num_ended = num_asked = 0
    for keys in (yield from queue.all_keys()):
        has_more = True
        while has_more:
            one_slice = calls.cancel_batch(keys, name, reason=reason)
            answers = yield from ask_calls([one_slice] * SLICES_PER_TRIP)
            num_ended += sum(answer[0] for answer in answers)
            num_asked += sum(answer[1] for answer in answers)
            has_more = answers[-1][2]
    return BatchCancelled(num_ended, num_asked)


def expire_batch(queue: Queue, name: str, deadline: Moment, *, is_new: bool = False) -> Operation[BatchView]:
    """Set the deadline of a batch in every partition; `is_new`: it may have no jobs yet.

    Raises:
        InvalidJob: `deadline` is not a point in time.
        BatchNotFound: the batch has no jobs.
    """
    deadline_ms = moment_ms("deadline", deadline) or 0
    if not is_new:
        yield from known_batch(queue, name)
    expirations = [calls.expire_batch(keys, name, deadline_ms=deadline_ms) for keys in (yield from queue.all_keys())]
    yield from ask_calls(expirations)
    return (yield from batch(queue, name))
