"""Operations for script calls: one call, several in one round trip, or one per slice of jobs."""

from collections.abc import Callable, Sequence

from sluice.producer.operations.operation import Ask, Operation, Result
from sluice.producer.operations.queue import Queue, partition_in
from sluice.protocol import limits
from sluice.protocol.calls import Call
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import command_of
from sluice.protocol.wire import JobId

SLICES_PER_TRIP = 8
"""Calls in one round trip that each process one slice of jobs."""


def ask_call(call: Call[Result], *, is_repeatable: bool = True) -> Operation[Result]:
    """Make one call and parse its reply."""
    [reply] = yield Ask((command_of(call),), is_repeatable)
    return call.parse(reply)


def ask_calls(calls: Sequence[Call[Result]], *, is_repeatable: bool = True) -> Operation[list[Result]]:
    """Make several calls in one round trip."""
    if not calls:
        return []
    replies = yield Ask(tuple(map(command_of, calls)), is_repeatable)
    return [call.parse(reply) for call, reply in zip(calls, replies, strict=True)]


def for_jobs(
    queue: Queue,
    job_ids: Sequence[JobId],
    make: Callable[[QueueKeys, Sequence[JobId]], Call[list[Result]]],
    *,
    is_repeatable: bool = True,
) -> Operation[list[Result]]:
    """Make a call for each partition and slice of the jobs, in one round trip; returns results in job order."""
    slices = slices_of(job_ids, limits.SLICE_JOBS)
    calls = [make(queue.keys(partition), [job_ids[i] for i in places]) for partition, places in slices]
    answers: dict[int, Result] = {}
    for (_, places), replies in zip(slices, (yield from ask_calls(calls, is_repeatable=is_repeatable)), strict=True):
        answers.update(zip(places, replies, strict=True))
    return [answers[i] for i in range(len(job_ids))]


def slices_of(job_ids: Sequence[JobId], slice_jobs: int) -> list[tuple[int, list[int]]]:
    """Return (partition, indices into `job_ids`) of each call."""
    places: dict[int, list[int]] = {}
    for i, job_id in enumerate(job_ids):
        places.setdefault(partition_in(job_id), []).append(i)
    return [
        (partition, here[at : at + slice_jobs])
        for partition, here in places.items()
        for at in range(0, len(here), slice_jobs)
    ]
