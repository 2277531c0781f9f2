"""Look up how responses ended, and store it.

The queue is asked first, then the history for jobs that the queue has forgotten. A response whose job neither knows is
lost, unless it is so new that its job may still be on the way to the queue.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from sluice.gateway.openai.responses import ResponseEnd, response_end
from sluice.gateway.responses.store import LOST, ResponseStore, StoredResponse
from sluice.gateway.threads import SQL
from sluice.producer.aio import AsyncProducer
from sluice.producer.operations.operation import Ask, Operation, Reply, channel_rows
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.views import views
from sluice.protocol.calls import JobView
from sluice.protocol.clock import wall_ms
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobResult, WireError, decode_entry, decode_result

GRACE_MS = 60_000
"""Time after which a response without a job is lost. A submit takes at most a second while its gateway runs."""


async def settle(
    producer: AsyncProducer, store: ResponseStore, open_ones: Sequence[StoredResponse]
) -> dict[str, ResponseEnd | JobState]:
    """Store the ends of a queue's responses that have ended; return the end, or the job's state, of each by id.

    Raises:
        QueueUnreachable, HistoryUnavailable: the ends cannot be read, or not be stored.
    """
    if not open_ones:
        return {}
    queue, job_ids = Queue(open_ones[0].queue), [response.info.job_id for response in open_ones]
    ends_or_states = await producer.run(_look(queue, job_ids))
    missing = [job_id for job_id in job_ids if ends_or_states[job_id] is None]
    recorded = await SQL.run(store.recorded, queue.name, missing) if missing else {}
    settled = {
        response.info.id: ends_or_states[response.info.job_id] or _missing(response, recorded) for response in open_ones
    }
    ends = {name: end for name, end in settled.items() if isinstance(end, ResponseEnd)}
    if ends:
        await SQL.run(store.finish, ends)
    return settled


def _missing(response: StoredResponse, recorded: Mapping[JobId, ResponseEnd]) -> ResponseEnd | JobState:
    """Return the end or state of a response whose job, or its output, the queue no longer has."""
    if response.info.job_id in recorded:
        return recorded[response.info.job_id]
    return LOST if response.info.created_ms < wall_ms() - GRACE_MS else JobState.QUEUED


def _look(queue: Queue, job_ids: Sequence[JobId]) -> Operation[dict[JobId, ResponseEnd | JobState | None]]:
    """Read the ends, or else the states, of jobs; None if a job is unknown or its output has expired."""
    by_id = dict(zip(job_ids, (yield from views(queue, job_ids)), strict=True))
    ended = {job_id: view for job_id, view in by_id.items() if view is not None and view.state.is_terminal}
    ends_or_states: dict[JobId, ResponseEnd | JobState | None] = {
        job_id: None if view is None or view.state.is_terminal else view.state for job_id, view in by_id.items()
    }
    if not ended:
        return ends_or_states
    replies = yield Ask(tuple(("GET", queue.keys_of(job_id).result(job_id)) for job_id in ended))
    unread: list[JobView] = []
    for (job_id, view), data in zip(ended.items(), replies, strict=True):
        if data is not None:
            ends_or_states[job_id] = _end_of(view, cast("bytes", data))
        elif view.state is not JobState.DONE:
            unread.append(view)
    return ends_or_states | (yield from _partial(queue, unread))


def _partial(queue: Queue, jobs: Sequence[JobView]) -> Operation[dict[JobId, ResponseEnd | JobState | None]]:
    """Read the ends of jobs that are not done and have no result; their output may be in their channels."""
    if not jobs:
        return {}
    replies = yield Ask(tuple(("XRANGE", queue.keys_of(job.id).channel(job.id), "-", "+") for job in jobs))
    return {job.id: _partial_end_of(job, reply) for job, reply in zip(jobs, replies, strict=True)}


def _partial_end_of(view: JobView, reply: Reply) -> ResponseEnd | JobState:
    """Return the end of a job without a result; its state if a newer release wrote the channel: it stays open."""
    try:
        output = _output(reply)
    except WireError:
        return view.state
    return response_end(view.state, None, output, None, (view.error_code, view.error))


def _output(reply: Reply) -> tuple[str, str]:
    """Return the text of a whole channel, and its format."""
    entries = [decode_entry(data) for _, data in channel_rows(reply)]
    is_whole = bool(entries) and entries[0].start == 0
    return ("".join(entry.text for entry in entries), entries[0].format) if is_whole else ("", "")


def _end_of(view: JobView, data: bytes) -> ResponseEnd | JobState:
    """Return the end of a job with a result; its state if a newer release wrote the result: it stays open."""
    try:
        result = decode_result(data)
    except WireError:
        return view.state
    reason = result.choices[0].finish_reason if result.choices else None
    return response_end(view.state, reason, output_of(result), result.usage, (view.error_code, view.error))


def output_of(result: JobResult) -> tuple[str, str]:
    """Return the text of a result's only choice, and its format."""
    return result.text, result.choices[0].format if result.choices else ""
