"""What tenants used and what it cost, and the prices of models. Methods block."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from sluice.producer.contract.tables import hourly_usage, jobs, prices
from sluice.producer.gateway.tables.database import Database
from sluice.producer.gateway.ui.read.overview import Latency
from sluice.producer.history.percentiles import percentile

RECENT_S = 900
MAX_JOBS = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a tenant used."""

    jobs: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    costs: tuple[tuple[str, float], ...] = ()
    """Amount by currency; jobs of models without a price cost nothing."""

    @property
    def tokens(self) -> int:
        """Prompt and output tokens."""
        return self.prompt_tokens + self.output_tokens

    def __add__(self, other: "Usage") -> "Usage":
        """Return both together."""
        costs: dict[str, float] = {}
        for currency, amount in (*self.costs, *other.costs):
            costs[currency] = costs.get(currency, 0.0) + amount
        return Usage(
            jobs=self.jobs + other.jobs,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            costs=tuple(sorted(costs.items())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a million tokens of a model cost."""

    model: str
    since_ms: int
    input: float
    cached: float
    output: float
    currency: str


def usage_in_hour(database: Database, queues: Sequence[str], hour_ms: int) -> Mapping[str, Usage]:
    """Return what each tenant used in an hour."""
    u = hourly_usage.c
    names = ("jobs", "prompt_tokens", "cached_tokens", "output_tokens", "cost")
    query = sa.select(u.tenant, u.currency, *(sa.func.sum(u[name]).label(name) for name in names))
    query = query.where(u.hour_ms == hour_ms, u.queue.in_(queues)).group_by(u.tenant, u.currency)
    found: dict[str, Usage] = {}
    with database.reading() as connection:
        for row in connection.execute(query).mappings():
            costs = () if row["cost"] is None else ((str(row["currency"]), float(row["cost"])),)
            tokens = {f"{kind}_tokens": int(row[f"{kind}_tokens"]) for kind in ("prompt", "cached", "output")}
            usage = Usage(jobs=int(row["jobs"]), costs=costs, **tokens)
            name = str(row["tenant"])
            found[name] = found.get(name, Usage()) + usage
    return found


def ttft_by_tenant(database: Database, queues: Sequence[str], tenant: str | None) -> Mapping[str, Latency]:
    """Return the time to the first token of each tenant's last jobs."""
    since_ms = round((time.time() - RECENT_S) * 1000)
    wanted = [jobs.c.submitted_ms >= since_ms, jobs.c.ttft_s.is_not(None), jobs.c.queue.in_(queues)]
    if tenant is not None:
        wanted.append(jobs.c.tenant == tenant)
    query = sa.select(jobs.c.tenant, jobs.c.ttft_s).where(*wanted).order_by(jobs.c.submitted_ms.desc()).limit(MAX_JOBS)
    values: dict[str, list[float]] = {}
    with database.reading() as connection:
        for name, ttft_s in connection.execute(query):
            values.setdefault(str(name), []).append(float(ttft_s))
    ordered = {name: sorted(known) for name, known in values.items()}
    return {name: Latency(p50_s=percentile(one, 50), p95_s=percentile(one, 95)) for name, one in ordered.items()}


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
