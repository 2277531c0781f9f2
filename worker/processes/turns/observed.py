"""What a group's queues hold: read in bounded calls, and turned into the demands that the policy compares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from sluice.protocol.calls import QueueView, inspect, whole_view
from sluice.protocol.keys import RETURNED, QueueKeys
from sluice.protocol.limits import MAX_PRIORITY
from sluice.protocol.redis.execution import run
from sluice.protocol.redis.surveys import pages_of_workers
from sluice.protocol.scaling.backlog import BACKLOG_FIELDS, Backlog, backlog_of
from sluice.protocol.workers import AWAY_STATES
from sluice.worker.connection.clients import Client
from sluice.worker.processes.turns.policy import Demand, weight_of

FIELDS = (*BACKLOG_FIELDS, "state")
CLASSES: Mapping[str | int, float] = {RETURNED: 1.0, **{one: weight_of(one) for one in range(MAX_PRIORITY + 1)}}
"""The weight of each class. Returned jobs wait in one list, without their classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A queue at one time."""

    at_s: float
    """When the reading began, on this process's clock."""

    backlog: Backlog
    oldest_s: Mapping[float, float]
    """Weight of a class -> age of its oldest waiting job, in seconds."""

    is_unserved: bool
    """Whether no living worker runs: jobs that run belong to one that died."""

    offers: Mapping[str, tuple[str, ...]]
    """What living workers offer, by model."""


def look_at_queue(client: Client, queue: str, partitions: Sequence[QueueKeys], at_s: float) -> Seen:
    """Read a queue: its counts, its workers, and the oldest job of each class.

    Raises:
        RedisError, OSError: the server does not answer.
    """
    views, oldest_s = list[QueueView](), dict[float, float]()
    for keys in partitions:
        view = run(client, inspect(keys))
        pages = pages_of_workers(client, keys, fields=FIELDS)
        views.append(whole_view(view, {name: about for page in pages for name, about in page.items()}))
        heads = client.exchange([("ZRANGE", keys.key("heads", one), 0, 0, "WITHSCORES") for one in CLASSES])
        for weight, head in zip(CLASSES.values(), heads, strict=True):
            if isinstance(head, list) and head:
                age_s = max(0.0, view.server_ms - _score_of(cast("list[object]", head))) / 1000
                oldest_s[weight] = max(age_s, oldest_s.get(weight, 0.0))
    states = [about.get("state") for view in views for about in view.workers.values()]
    return Seen(
        at_s=at_s,
        backlog=backlog_of(queue, views),
        oldest_s=oldest_s,
        is_unserved=all(state in AWAY_STATES for state in states),
        offers={model: texts for view in views for model, texts in view.offers.items()},
    )


def _score_of(head: Sequence[object]) -> float:
    """Read the reply to a ZRANGE of one element with its score, as a pair or flat."""
    last = head[-1]
    if isinstance(last, list | tuple):
        last = cast("Sequence[object]", last)[-1]
    return float(last) if isinstance(last, bytes | str | int | float) else 0.0


def demand_of(name: str, seen: Seen, *, away_s: float | None, can_run: bool) -> Demand:
    """Return what a queue asks of the device.

    Args:
        name: The member.
        seen: Its queue.
        away_s: How long ago the member left the device: its jobs have not waited for longer, however old they are.
            None: it has the device.
        can_run: As in `Demand`.
    """
    backlog = seen.backlog
    rate = backlog.worker_tokens_per_s
    waiting = 0 if backlog.is_paused else backlog.backlog_jobs
    # While no worker is there, those that run belong to one that died, and wait for the next.
    running = backlog.running_jobs if away_s is None or seen.is_unserved else 0
    most_s = away_s or 0.0
    waits_s = {weight: min(age_s, most_s) for weight, age_s in seen.oldest_s.items()} if waiting else {}
    unlisted_s = most_s if waiting or running else 0.0  # suspects, and those of a worker that died
    return Demand(
        name=name,
        waiting_jobs=waiting,
        running_jobs=running,
        waits_s=max(waits_s.values(), default=unlisted_s),
        weighted_wait_s=max((weight * wait_s for weight, wait_s in waits_s.items()), default=unlisted_s),
        weight=max(waits_s, default=1.0),
        deadline_s=backlog.nearest_deadline_s if waiting else None,
        work_s=(backlog.backlog_tokens + backlog.running_tokens) / rate if rate else None,
        can_run=can_run,
    )
