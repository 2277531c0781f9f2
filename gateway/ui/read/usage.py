"""Usage and costs of tenants, and the prices of models. Methods block."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import sqlalchemy as sa

from sluice.gateway.tables.database import Database
from sluice.gateway.ui.read.overview import Latency
from sluice.history.percentiles import percentile
from sluice.history.tables import jobs, prices
from sluice.history.views import hourly_usage

RECENT_S = 900
MAX_JOBS = 5000
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """The usage of a tenant."""

    jobs: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    costs: tuple[tuple[str, float], ...] = ()
    """Amount by currency."""

    unpriced: tuple[tuple[str, int], ...] = ()
    """Tokens by model without a price, whose cost is unknown."""

    @property
    def tokens(self) -> int:
        """Prompt and output tokens."""
        return self.prompt_tokens + self.output_tokens

    @property
    def unpriced_tokens(self) -> int:
        """Total tokens of models without a price."""
        return sum(tokens for _, tokens in self.unpriced)

    def __add__(self, other: "TenantUsage") -> "TenantUsage":
        """Return the sum of both."""
        return TenantUsage(
            jobs=self.jobs + other.jobs,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            costs=_summed(*self.costs, *other.costs),
            unpriced=_summed(*self.unpriced, *other.unpriced),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a million tokens of a model."""

    model: str
    since_ms: int
    input: float
    cached: float
    output: float
    currency: str


def usage_in_hour(database: Database, queues: Sequence[str], hour_ms: int) -> Mapping[str, TenantUsage]:
    """Return the usage of each tenant in an hour."""
    u = hourly_usage.c
    names = ("jobs", "prompt_tokens", "cached_tokens", "output_tokens", "cost")
    groups = (u.tenant, u.model, u.currency)
    query = sa.select(*groups, *(sa.func.sum(u[name]).label(name) for name in names))
    query = query.where(u.hour_ms == hour_ms, u.queue.in_(queues)).group_by(*groups)
    usage: dict[str, TenantUsage] = {}
    with database.reading() as connection:
        for row in connection.execute(query).mappings():
            name = str(row["tenant"])
            usage[name] = usage.get(name, TenantUsage()) + _usage_in(row)
    return usage


def _usage_in(row: sa.RowMapping) -> TenantUsage:
    usage = TenantUsage(
        jobs=int(row["jobs"]),
        prompt_tokens=int(row["prompt_tokens"]),
        cached_tokens=int(row["cached_tokens"]),
        output_tokens=int(row["output_tokens"]),
    )
    if row["cost"] is not None:
        return replace(usage, costs=((str(row["currency"]), float(row["cost"])),))
    # A job that no worker started has neither a model nor output.
    return replace(usage, unpriced=((str(row["model"]), usage.tokens),)) if row["model"] and usage.tokens else usage


def _summed(*amounts: tuple[str, Number]) -> tuple[tuple[str, Number], ...]:
    """Add up amounts of the same name."""
    sums: dict[str, Number] = {}
    for name, amount in amounts:
        sums[name] = sums[name] + amount if name in sums else amount
    return tuple(sorted(sums.items()))


def ttft_by_tenant(database: Database, queues: Sequence[str], tenant: str | None) -> Mapping[str, Latency]:
    """Return the time to first token of each tenant's last jobs."""
    since_ms = round((time.time() - RECENT_S) * 1000)
    conditions = [jobs.c.submitted_ms >= since_ms, jobs.c.ttft_s.is_not(None), jobs.c.queue.in_(queues)]
    if tenant is not None:
        conditions.append(jobs.c.tenant == tenant)
    newest_first = sa.select(jobs.c.tenant, jobs.c.ttft_s).where(*conditions).order_by(jobs.c.submitted_ms.desc())
    query = newest_first.limit(MAX_JOBS)
    values: dict[str, list[float]] = {}
    with database.reading() as connection:
        for name, ttft_s in connection.execute(query):
            values.setdefault(str(name), []).append(float(ttft_s))
    ordered = {name: sorted(times) for name, times in values.items()}
    return {name: Latency(p50_s=percentile(row, 50), p95_s=percentile(row, 95)) for name, row in ordered.items()}


def prices_now(database: Database) -> list[Price]:
    """Return the newest price of each model."""
    newest = sa.select(prices.c.model, sa.func.max(prices.c.since_ms).label("since_ms")).group_by(prices.c.model)
    latest = newest.subquery()
    is_it = sa.and_(prices.c.model == latest.c.model, prices.c.since_ms == latest.c.since_ms)
    query = sa.select(*prices.columns).join(latest, is_it).order_by(prices.c.model)
    with database.reading() as connection:
        return [
            Price(**{str(name): value for name, value in row.items()}) for row in connection.execute(query).mappings()
        ]


def set_price(database: Database, price: Price) -> None:
    """Set the price of a model from a time on."""
    row = {name: getattr(price, name) for name in ("model", "since_ms", "input", "cached", "output", "currency")}
    is_it = (prices.c.model == price.model, prices.c.since_ms == price.since_ms)
    with database.transaction() as connection:
        connection.execute(prices.delete().where(*is_it))
        connection.execute(prices.insert().values(**row))
