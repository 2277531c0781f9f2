"""Wait for the ends of many jobs, without I/O: the same generators as `commands.py`, which also yield outcomes."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import TypeAlias, cast

from producer.commands import Ask, Command, Pause, Queue, Reply, Step, channel_rows, outcome, views
from producer.contract.calls import JobView
from producer.contract.wire import ChannelEntry, JobId, JobResult, decode_entry
from producer.errors import JobNotDone, JobNotFound, ProducerError, ResultExpired

FRONT = 512
"""Of the jobs that have not ended, the oldest so many are looked at in every round: they end first."""

SLICE = 512
"""Of the rest, so many, each round others: priorities and tenants let some overtake."""

MIN_PAUSE_S = 0.005
MAX_PAUSE_S = 1.0
IDLE_SHARE = 9
"""A round is followed by a pause this many times as long: asking takes no more than a tenth of the server's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one job ended."""

    job_id: JobId
    view: JobView | None
    """Its times and counts; None where the queue no longer knows it."""

    result: JobResult | None
    """Its output, whole when `error` is None."""

    error: ProducerError | None
    """JobFailed, JobCancelled, JobExpired, ResultExpired or JobNotFound."""

    entries: tuple[ChannelEntry, ...] = ()
    """Of its first choice's channel, where that was asked for and is still there."""


Outcomes: TypeAlias = Generator[Step | Outcome, list[Reply], None]


def outcomes(queue: Queue, job_ids: Iterable[JobId], *, with_entries: bool = False) -> Outcomes:
    """Yield the outcome of each job, as they end."""
    watched = dict.fromkeys(job_ids)
    turn = 0
    while watched:
        begin_s = monotonic()
        now = _this_round(list(watched), turn)
        found = yield from views(queue, now)
        looks = list(zip(now, found, strict=True))
        ended = {job_id: view for job_id, view in looks if view is None or view.state.is_terminal}
        yield from _ended(queue, ended, with_entries=with_entries)
        for job_id in ended:
            del watched[job_id]
        turn += 1
        if watched and len(ended) * 2 < len(now):
            yield Pause(min(MAX_PAUSE_S, max(MIN_PAUSE_S, IDLE_SHARE * (monotonic() - begin_s))))


def _this_round(watched: list[JobId], turn: int) -> list[JobId]:
    rest = len(watched) - FRONT
    if rest <= 0:
        return watched
    at = FRONT + turn * SLICE % rest
    return watched[:FRONT] + watched[at : at + SLICE]


def _ended(queue: Queue, ended: dict[JobId, JobView | None], *, with_entries: bool) -> Outcomes:
    if not ended:
        return
    commands: list[Command] = [("GET", queue.keys_of(job_id).result(job_id)) for job_id in ended]
    if with_entries:
        commands += [("XRANGE", queue.keys_of(job_id).channel(job_id), "-", "+") for job_id in ended]
    replies = yield Ask(tuple(commands))
    channels = replies[len(ended) :] or [[]] * len(ended)
    for (job_id, view), data, channel in zip(ended.items(), replies, channels, strict=False):
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
