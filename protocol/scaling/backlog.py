"""The backlog of a queue, and the throughput of one worker. No I/O.

Both are in reserved tokens. A waiting job counts with its cost: its prompt, and at most `reserve_tokens` (256) output
tokens for each choice. A worker counts the same number for each job that it ends, however many tokens that job used.
So outputs that are shorter or longer than their reserve change the measured rate, and no conversion is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

from sluice.protocol.calls import QueueView
from sluice.protocol.limits import CAPACITY, CAPACITY_FIELD, HELD_TOKENS_FIELD

BACKLOG_FIELDS = (CAPACITY_FIELD, HELD_TOKENS_FIELD)
"""Fields of heartbeats that a backlog needs."""

RateSource = Literal["measured", "remembered", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The work of a queue, and the throughput of one worker."""

    queue: str
    backlog_jobs: int
    """Jobs that could start now; in `backlog_tokens`, the tokens that they reserve. Delayed jobs do not count, those
    that wait for a limit of their tenant do."""

    backlog_tokens: int
    running_jobs: int
    """Jobs that workers hold; in `running_tokens`, the unused part of their reservations."""

    running_tokens: int
    workers: int
    """Number of living workers."""

    worker_tokens_per_s: float | None
    """Throughput of a full worker in reserved tokens a second: the mean of the living workers."""

    rate_source: RateSource
    """Whether living workers have measured that rate, it is left from the last ones, or it is unknown."""

    oldest_age_s: float | None
    """Age of the oldest waiting job."""

    nearest_deadline_s: float | None
    """Time until the nearest deadline; below 0 if it has passed."""

    is_paused: bool


def backlog_of(queue: str, views: Sequence[QueueView]) -> Backlog:
    """Sum up the partitions of a queue; `views` must not be empty."""
    now_ms = max(view.server_ms for view in views)
    workers = {name: about for view in views for name, about in view.workers.items()}
    oldest_ms = min((view.oldest_ms for view in views if view.oldest_ms is not None), default=None)
    deadline_ms = min((view.deadline_ms for view in views if view.deadline_ms is not None), default=None)
    rate, source = _rate(views, workers)
    return Backlog(
        queue=queue,
        backlog_jobs=sum(map(_ready_jobs, views)),
        backlog_tokens=sum(map(_ready_tokens, views)),
        running_jobs=sum(max(0, view.running_jobs) for view in views),
        running_tokens=round(sum(_number(about.get(HELD_TOKENS_FIELD)) or 0.0 for about in workers.values())),
        workers=len(workers),
        worker_tokens_per_s=rate,
        rate_source=source,
        oldest_age_s=None if oldest_ms is None else round(max(0, now_ms - oldest_ms) / 1000, 1),
        nearest_deadline_s=None if deadline_ms is None else round((deadline_ms - now_ms) / 1000, 1),
        is_paused=any(view.is_paused for view in views),
    )


def backlog_of_all(views: Mapping[str, Sequence[QueueView]]) -> Backlog:
    """Sum up several queues that have the same workers; `views` are those of each queue's partitions.

    Waiting jobs of a queue that is paused do not count, unless all are.
    """
    paused = {queue for queue, own in views.items() if any(view.is_paused for view in own)}
    uncounted = paused if len(paused) < len(views) else set[str]()
    counted = [
        replace(view, waiting_jobs=0, is_paused=False) if queue in uncounted else view
        for queue, own in views.items()
        for view in own
    ]
    return backlog_of(", ".join(views), counted)


def _ready_jobs(view: QueueView) -> int:
    """Return the number of waiting jobs that could start now: without delayed jobs that are not due."""
    return max(0, view.waiting_jobs - max(0, view.delayed_jobs - view.due_jobs))


def _ready_tokens(view: QueueView) -> int:
    """Return the tokens that these jobs reserve, at the mean of all waiting jobs, for which the queue has one sum."""
    if view.waiting_jobs <= 0:
        return 0
    return round(max(0, view.waiting_tokens) * _ready_jobs(view) / view.waiting_jobs)


def _rate(views: Sequence[QueueView], workers: Mapping[str, Mapping[str, str]]) -> tuple[float | None, RateSource]:
    measured = [rate for about in workers.values() if (rate := _number(about.get(CAPACITY_FIELD)))]
    if measured:
        return sum(measured) / len(measured), "measured"
    left = [rate for view in views if (rate := _number(view.settings.get(CAPACITY)))]
    return (left[0], "remembered") if left else (None, "unknown")


def _number(text: str | None) -> float | None:
    """Parse a number that another program may have written; None unless it is above 0."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if isfinite(number) and number > 0 else None
