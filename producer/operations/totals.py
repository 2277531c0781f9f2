"""Sum up the state of a queue over its partitions, and of its tenants. No I/O."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.protocol.calls import QueueView, TenantLimit
from sluice.protocol.keys import RETURNED
from sluice.protocol.limits import MAX_WEIGHT, MIN_WEIGHT

SUMMED = ("max_running", "running", "tokens_per_minute", "tokens_left")
"""What is summed up of the limits of a tenant: each partition has a part of them."""

WEIGHT = "weight:"
"""Prefix of the settings with tenants' weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTotals:
    """The state of a queue."""

    queue: str
    waiting: int
    """Waiting jobs; in `tokens`, the tokens that they reserve."""

    tokens: int
    running: int
    oldest_s: float | None
    """Age of the oldest waiting job, which was submitted at `oldest_ms`."""

    oldest_ms: int | None
    dead: int
    """Number of failed jobs in the dead set."""

    suspects: int
    returned: int
    """Number of waiting jobs that a worker has returned."""

    outbox: int
    """Number of events that are not in the history yet."""

    workers: int
    worker_deaths: int
    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTotals:
    """The waiting jobs of a tenant in one queue."""

    tenant: str
    queue: str
    waiting: int
    """Waiting jobs; in `tokens`, the tokens that they reserve."""

    tokens: int
    weight: float
    """In mode fair, tenants get tokens in proportion to their weights."""

    share: float | None
    """Fraction of the weights of all tenants with waiting jobs; null unless it has some and the mode is fair."""

    max_running: int | None = None
    """Limit of the jobs that run at once, of which `running` do; both null without this limit."""

    running: int | None = None
    tokens_per_minute: int | None = None
    """Limit of the tokens of prompts and outputs a minute, of which `tokens_left` may be taken now."""

    tokens_left: int | None = None
    is_at_limit: bool = False
    """Whether its waiting jobs wait for one of these limits."""


def queue_totals(name: str, views: Sequence[QueueView]) -> QueueTotals:
    """Sum up the partitions of a queue."""
    oldest_ms = min((view.oldest_ms for view in views if view.oldest_ms is not None), default=None)
    now_ms = max(view.server_ms for view in views)
    return QueueTotals(
        queue=name,
        waiting=sum(view.waiting_jobs for view in views),
        tokens=sum(view.waiting_tokens for view in views),
        running=sum(view.running_jobs for view in views),
        oldest_s=None if oldest_ms is None else round((now_ms - oldest_ms) / 1000, 1),
        oldest_ms=oldest_ms,
        dead=sum(view.dead for view in views),
        suspects=sum(view.suspects for view in views),
        returned=sum(jobs for view in views for kind, _, jobs, _ in view.lanes if kind == RETURNED),
        outbox=sum(view.outbox_entries for view in views),
        workers=len({name for view in views for name in view.workers}),
        worker_deaths=sum(view.worker_deaths for view in views),
        paused=any(view.is_paused for view in views),
    )


def tenant_totals(name: str, views: Sequence[QueueView]) -> list[TenantTotals]:
    """Sum up the waiting jobs of each tenant that has waiting jobs, a weight or a limit, by name."""
    settings = {key: value for view in views for key, value in view.settings.items()}
    weights = {key.removeprefix(WEIGHT): _weight(value) for key, value in settings.items() if key.startswith(WEIGHT)}
    jobs, tokens = Counter[str](), Counter[str]()
    for tenant, num_jobs, num_tokens, _ in (row for view in views for row in view.tenants):
        jobs[tenant] += num_jobs
        tokens[tenant] += num_tokens
    waiting = {tenant for view in views for _, tenant, num_jobs, _ in view.lanes if num_jobs}
    total = sum(weights.get(tenant, 1.0) for tenant in waiting)
    is_fair = settings.get("mode") == "fair"
    limits = _limits(views)
    return [
        TenantTotals(
            tenant=tenant,
            queue=name,
            waiting=jobs[tenant],
            tokens=tokens[tenant],
            weight=weights.get(tenant, 1.0),
            share=weights.get(tenant, 1.0) / total if is_fair and tenant in waiting else None,
            **limits.get(tenant, {}),
        )
        for tenant in sorted({*weights, *waiting, *jobs, *limits})
    ]


def _limits(views: Sequence[QueueView]) -> dict[str, dict[str, Any]]:
    """Return the fields about limits of each tenant that has some."""
    listed: dict[str, list[TenantLimit]] = {}
    for limit in (limit for view in views for limit in view.limits):
        listed.setdefault(limit.tenant, []).append(limit)
    return {
        tenant: {
            **{name: _sum([getattr(limit, name) for limit in limits]) for name in SUMMED},
            "is_at_limit": any(limit.is_at_limit for limit in limits),
        }
        for tenant, limits in listed.items()
    }


def _sum(parts: Sequence[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _weight(text: str) -> float:
    """Parse a weight as the scripts do: 1 if it is not valid, since another user may have written it."""
    try:
        weight = float(text)
    except ValueError:
        return 1.0
    return weight if MIN_WEIGHT <= weight <= MAX_WEIGHT else 1.0
