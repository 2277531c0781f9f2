"""Wait for jobs to end, and read their output. No I/O."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from math import ceil
from time import monotonic
from typing import TypeAlias, cast

from sluice.producer.errors import (
    ENDS_BADLY,
    JobFailed,
    JobNotDone,
    JobNotFound,
    ProducerError,
    ResultExpired,
)
from sluice.producer.operations.chains import with_blocked
from sluice.producer.operations.control import OverdueJobs
from sluice.producer.operations.countdown import Countdown, within
from sluice.producer.operations.operation import (
    Ask,
    Command,
    Entries,
    Operation,
    Read,
    Reply,
    Sleep,
    Step,
    channel_rows,
    is_end_id,
)
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.views import explain, views
from sluice.protocol import calls
from sluice.protocol.calls import JobView
from sluice.protocol.errors import WireError
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import command_of
from sluice.protocol.states import JobState
from sluice.protocol.waits import Wait, WaitNotifier
from sluice.protocol.wire import ChannelEntry, JobId, JobResult, decode_entry, decode_result, decode_spec

WAIT_BLOCK_MS = 2000
"""Longest blocking read, after which the state is read again, since the worker may have died or the channel expired."""

MAX_LOOK_S = 30.0
"""Longest interval between two reads of the state while a channel is silent. The interval doubles up to this."""

SILENT_LOOK_S = 0.05
"""Longest interval between two reads of the state of a job whose end is not on its channel."""

BLOCKED_LOOK_S = 0.5
"""The same of a blocked job, of which only the queue knows whether it is streamed."""

WAIT_SHARE = 0.05
MAX_WAIT_S = 0.1
"""Longest pause of a waiting `result` between reads, in seconds, and its share of the time waited so far."""

FRONT = 512
"""Number of oldest unfinished jobs, which are polled in every round because they usually end first."""

SLICE = 512
"""Number of other unfinished jobs polled in each round, in turn, because priorities and tenants change the order."""

MIN_PAUSE_S = 0.005
MAX_PAUSE_S = 1.0
IDLE_SHARE = 9
"""Ratio of a pause to the preceding round of reads, so that they take at most a tenth of the time."""


def result(
    queue: Queue, job_id: JobId, timeout_s: float | None, *, waits: WaitNotifier | None = None
) -> Operation[JobResult]:
    """Wait for a job to end and return its output; report long waits.

    Raises:
        JobFailed, JobCancelled, JobExpired: the job ended otherwise; `partial` has its output so far.
        ResultTimeout: the job did not end in time, or the server did not answer.
        ResultExpired: the job is done, but its output has expired.
        JobNotFound: the job is unknown.
    """
    return (yield from within(timeout_s, packed_result(queue, job_id, timeout_s, waits=waits))).unpack()


@dataclass(frozen=True, slots=True)
class PackedResult:
    """An ended job, with its output as packed by its worker."""

    job_id: JobId
    view: JobView | None
    data: bytes | None

    @property
    def num_bytes(self) -> int:
        """Size of the packed output."""
        return len(self.data or b"")

    def unpack(self) -> JobResult:
        """Return the output. This takes seconds for a large one.

        Raises:
            JobFailed, JobCancelled, JobExpired, ResultExpired, JobNotFound: as in `result`.
        """
        if self.view is not None:
            return outcome(self.view, self.data)
        if self.data is not None:
            return decode_result(self.data)
        raise JobNotFound(self.job_id)


def packed_result(
    queue: Queue, job_id: JobId, timeout_s: float | None = None, *, waits: WaitNotifier | None = None
) -> Operation[PackedResult]:
    """Wait for a job to end and return its packed output; report long waits.

    Raises:
        ResultTimeout: the job did not end in time.
    """
    with (waits or WaitNotifier()).wait() as wait:
        return (yield from _packed_result(queue, job_id, Countdown(timeout_s), wait))


def _packed_result(queue: Queue, job_id: JobId, clock: Countdown, wait: Wait) -> Operation[PackedResult]:
    published: tuple[int, ...] = ()
    overdue = OverdueJobs(queue)
    while True:
        view, data = yield from look(queue, job_id)
        if view is None or view.state.is_terminal:
            return PackedResult(job_id, view, data)
        clock.check(f"job {job_id} is still {view.state},")
        if view.published != published:
            published = view.published
            wait.goes_on()
        elif wait.is_due:
            wait.waits_for((yield from explain(queue, view)))
        look_in_s = yield from overdue.end([view])
        if (silent_s := silent_look_s(view)) is not None:
            yield Sleep(max(MIN_PAUSE_S, min(silent_s, WAIT_SHARE * clock.passed_s)))
        else:
            yield from _wait_for_end(queue.keys_of(job_id), view, clock, min(WAIT_BLOCK_MS / 1000, look_in_s))


def silent_look_s(view: JobView) -> float | None:
    """Return the longest interval between two reads of the state of a job whose channel may have no end."""
    if view.state is JobState.BLOCKED:
        return BLOCKED_LOOK_S
    return SILENT_LOOK_S if _ends_silently(view) else None


def _ends_silently(view: JobView) -> bool:
    """Return whether a job's end is not on its channel if it is done now: it is not streamed, and has no output yet."""
    if view.choices > 1 or sum(view.published) or view.spec is None:
        return False
    try:
        spec = decode_spec(view.spec)
    except WireError:
        return False
    return not (spec.stream or spec.awaited)


def look(queue: Queue, job_id: JobId) -> Operation[tuple[JobView | None, bytes | None]]:
    """Read the state and the encoded result of a job."""
    keys = queue.keys_of(job_id)
    status = calls.status(keys, [job_id])
    # The state first, because a result is written before its job becomes terminal.
    state, data = yield Ask((command_of(status), ("GET", keys.result(job_id))))
    found = status.parse(state)
    [view] = yield from with_blocked(queue, [job_id], found)
    if found[0] is None and view is not None and view.state.is_terminal:
        return (yield from look(queue, job_id))  # it was blocked at the first read, and has ended since
    return view, cast("bytes | None", data)


def outcome(view: JobView, data: bytes | None) -> JobResult:
    """Return the output of an ended job.

    Raises:
        JobFailed, JobCancelled, JobExpired, ResultExpired: as in `result`.
    """
    result = decode_result(data) if data is not None else None
    if view.state is not JobState.DONE:
        raise ended_badly(view, result)
    if result is None:
        raise ResultExpired(
            f"job {view.id} is done, but its output has expired. Look in the history: producer jobs show."
        )
    return result


def ended_badly(view: JobView, partial: JobResult | None = None) -> ProducerError:
    """Return the error of a job that ended in another state than done."""
    kind = ENDS_BADLY.get(view.state, JobFailed)
    return kind(view.id, view.error or "no reason was given", code=view.error_code, partial=partial)


def _wait_for_end(keys: QueueKeys, view: JobView, clock: Countdown, most_s: float) -> Operation[None]:
    """Block on the channels until every choice has its end, or for about `most_s`; then the state is read again."""
    offsets = [*view.published, *[0] * view.choices]
    cursors = {keys.channel(view.id, choice): f"{offsets[choice]}-0" for choice in range(view.choices)}
    until_s = clock.passed_s + most_s
    while cursors and (left_s := until_s - clock.passed_s) > 0:
        reply = yield Read(dict(cursors), clock.block_ms(ceil(1000 * left_s)))
        if not reply:
            return
        for key, entries in cast("list[tuple[str, Entries]]", reply):
            cursors[key] = entries[-1][0]
            if is_end_id(cursors[key]):
                del cursors[key]
        if not view.attempt and len(cursors) < view.choices:
            return  # a job that never started has its end in one channel only
        if cursors:
            # Tokens end the read, too: growing pauses bound both the cost and the added latency.
            yield Sleep(min(MAX_WAIT_S, WAIT_SHARE * clock.passed_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one job, and its output."""

    job_id: JobId
    view: JobView | None
    """The job's times and counts; None if the queue no longer has it."""

    result: JobResult | None
    """The job's output, complete if `error` is None."""

    error: ProducerError | None
    """JobFailed, JobCancelled, JobExpired, ResultExpired or JobNotFound."""

    entries: tuple[ChannelEntry, ...] = ()
    """Entries of the first choice's channel, if requested and not expired."""


def vector_of(outcome: Outcome) -> list[float]:
    """Return the vector of a job.

    Raises:
        ProducerError: it did not end as done.
    """
    if outcome.error is not None:
        raise outcome.error
    vector = None if outcome.result is None else outcome.result.embedding
    assert vector is not None, "a job that embeds has a vector"
    return vector


Outcomes: TypeAlias = Generator[Step | Outcome, list[Reply], None]


def outcomes(
    queue: Queue,
    job_ids: Iterable[JobId],
    *,
    with_entries: bool = False,
    is_waiting: bool = True,
    waits: WaitNotifier | None = None,
) -> Outcomes:
    """Yield the outcome of each job as it ends; report waits in which none ends. `is_waiting`: False: as `ended`."""
    if not is_waiting:
        return (yield from ended(queue, job_ids, with_entries=with_entries))
    with (waits or WaitNotifier()).wait() as wait:
        yield from _outcomes(queue, dict.fromkeys(job_ids), wait, with_entries=with_entries)


def ended(queue: Queue, job_ids: Iterable[JobId], *, with_entries: bool = False) -> Outcomes:
    """Yield the outcomes of the jobs that have ended or are unknown, without waiting for the others."""
    unique = list(dict.fromkeys(job_ids))
    job_views = yield from views(queue, unique)
    yield from _read_outcomes(queue, _over(unique, job_views), with_entries=with_entries)


def _outcomes(queue: Queue, watched: dict[JobId, None], wait: Wait, *, with_entries: bool) -> Outcomes:
    turn, progress = 0, (len(watched), ())
    overdue = OverdueJobs(queue)
    while watched:
        begin_s = monotonic()
        now = _this_round(list(watched), turn)
        job_views = yield from views(queue, now)
        yield from overdue.end(job_views)
        over = _over(now, job_views)
        yield from _read_outcomes(queue, over, with_entries=with_entries)
        for job_id in over:
            del watched[job_id]
        first, before, progress = job_views[0], progress, (len(watched), job_views[0] and job_views[0].published)
        if progress != before:
            wait.goes_on()
        elif first is not None and wait.is_due:
            wait.waits_for((yield from explain(queue, first)))
        turn += 1
        if watched and len(over) * 2 < len(now):
            yield Sleep(min(MAX_PAUSE_S, max(MIN_PAUSE_S, IDLE_SHARE * (monotonic() - begin_s))))


def _this_round(watched: list[JobId], turn: int) -> list[JobId]:
    rest = len(watched) - FRONT
    if rest <= 0:
        return watched
    at = FRONT + turn * SLICE % rest
    return watched[:FRONT] + watched[at : at + SLICE]


def _over(job_ids: Iterable[JobId], views: Iterable[JobView | None]) -> dict[JobId, JobView | None]:
    looks = zip(job_ids, views, strict=True)
    return {job_id: view for job_id, view in looks if view is None or view.state.is_terminal}


def _read_outcomes(queue: Queue, over: dict[JobId, JobView | None], *, with_entries: bool) -> Outcomes:
    if not over:
        return
    commands: list[Command] = [("GET", queue.keys_of(job_id).result(job_id)) for job_id in over]
    if with_entries:
        commands += [("XRANGE", queue.keys_of(job_id).channel(job_id), "-", "+") for job_id in over]
    replies = yield Ask(tuple(commands))
    channels = replies[len(over) :] or [[]] * len(over)
    for (job_id, view), data, channel in zip(over.items(), replies, channels, strict=False):
        entries = tuple(decode_entry(entry) for _, entry in channel_rows(channel)) if view is not None else ()
        yield _outcome(job_id, view, cast("bytes | None", data), entries)


def _outcome(job_id: JobId, view: JobView | None, data: bytes | None, entries: tuple[ChannelEntry, ...]) -> Outcome:
    if view is None:
        return Outcome(job_id=job_id, view=None, result=None, error=JobNotFound(job_id))
    try:
        return Outcome(job_id=job_id, view=view, result=outcome(view, data), error=None, entries=entries)
    except JobNotDone as error:
        return Outcome(job_id=job_id, view=view, result=error.partial, error=error, entries=entries)
    except ResultExpired as error:
        return Outcome(job_id=job_id, view=view, result=None, error=error, entries=entries)
