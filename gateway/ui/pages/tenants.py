"""Tenants: share and weight, tokens, latency, limits and cost; and the prices of models."""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.gateway.audit import AuditLog
from sluice.gateway.errors import bad_request
from sluice.gateway.keyring import Keyring
from sluice.gateway.native.search import queue_named
from sluice.gateway.prices import price_problem
from sluice.gateway.queues import Queues
from sluice.gateway.tables.database import Database
from sluice.gateway.tenant_limits import set_limits
from sluice.gateway.threads import HISTORY, SQL
from sluice.gateway.ui.frame import CONFIRMATIONS, Form, Frame, after, render
from sluice.gateway.ui.read.day import DayUsage
from sluice.gateway.ui.read.overview import Latency
from sluice.gateway.ui.read.surveys import Surveys
from sluice.gateway.ui.read.usage import Price, TenantUsage, prices_now, set_price, ttft_by_tenant
from sluice.gateway.ui.visitors import Visitor
from sluice.producer.errors import ProducerError
from sluice.producer.operations.totals import TenantTotals, tenant_totals
from sluice.protocol.calls import TENANT_LIMITS
from sluice.protocol.checks import whole
from sluice.protocol.clock import wall_ms

PATH = "/ui/tenants"

CONFIRMATIONS.update(
    price_set=("good", "The price is set. It applies to jobs submitted from now on."),
    limits_set=("good", "The limits are set. They apply to the next jobs that start."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLine:
    """A tenant with its figures."""

    name: str
    waiting: int
    weight: float
    usage: TenantUsage
    token_share: float | None
    """Fraction of all tokens of the last day; in `weight_share`, of all weights of the listed tenants."""

    weight_share: float
    ttft: Latency
    limits: str
    """Of its API keys; in `in_queues`, of the tenant in each queue that limits it."""

    in_queues: tuple[TenantTotals, ...]


class TenantsPage:
    """The page, and the forms that set a price and limits. Without `admin`, a visitor sees its own tenant."""

    def __init__(
        self,
        frame: Frame,
        queues: Queues,
        surveys: Surveys,
        database: Database,
        keyring: Keyring,
        audit: AuditLog,
    ) -> None:
        self._frame, self._queues, self._surveys = frame, queues, surveys
        self._database, self._keyring, self._audit = database, keyring, audit
        self._day = DayUsage(database, [queue.name for queue in queues])

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        yield self._frame.page(PATH, self._show)
        yield self._frame.action("/ui/prices", self._set_price, scope="admin")
        yield self._frame.action("/ui/limits", self._set_limits, scope="admin")

    async def _show(self, request: Request, visitor: Visitor) -> Response:
        names = [queue.name for queue in self._queues]
        own = None if visitor.may("admin") else visitor.caller.tenant
        (usage, hours_left), ttft, prices = await asyncio.gather(
            self._day.get(),
            HISTORY.run(ttft_by_tenant, self._database, names, own),
            HISTORY.run(prices_now, self._database),
        )
        if own is not None:
            usage = {own: usage.get(own, TenantUsage())}
        totals = await self._totals() if own is None else []
        named = {*usage, *(total.tenant for total in totals)}
        lines = _lines(sorted(named), totals, usage, ttft, self._keyring)
        return render(
            request,
            "tenants.html",
            tenants=lines,
            prices=prices,
            unpriced=sum(usage.values(), TenantUsage()).unpriced,
            is_all=own is None,
            hours_left=hours_left,
            queues=names,
        )

    async def _totals(self) -> list[TenantTotals]:
        try:
            views = await asyncio.gather(*map(self._surveys.of, self._queues))
        except ProducerError:
            return []
        return [
            total for queue, view in zip(self._queues, views, strict=True) for total in tenant_totals(queue.name, view)
        ]

    async def _set_price(self, request: Request, visitor: Visitor, form: Form) -> Response:
        del request
        price = price_of({name: values[0] for name, values in form.items()})
        async with self._audit.action(visitor.caller, "set_price", price.model):
            await SQL.run(set_price, self._database, price)
        return after(PATH, "price_set")

    async def _set_limits(self, request: Request, visitor: Visitor, form: Form) -> Response:
        del request
        values = {name: texts[0].strip() for name, texts in form.items()}
        limits = {name: _limit(name, values.get(name, "")) for name in TENANT_LIMITS}
        queue = queue_named(self._queues, values.get("queue", ""))
        await set_limits(self._audit, visitor.caller, queue, values.get("tenant", ""), limits)
        self._surveys.forget(queue)
        return after(PATH, "limits_set")


def _limit(name: str, text: str) -> int | None:
    """Read a limit; an empty field is none.

    Raises:
        HttpError: 400, it is not a whole number.
    """
    if not text:
        return None
    if (number := whole(text)) is None:
        raise bad_request(f"{name} must be a whole number, or empty for no limit")
    return number


def price_of(form: Mapping[str, str]) -> Price:
    """Read a price from a form.

    Raises:
        HttpError: 400, a field is missing or out of its range.
    """
    model, currency = form.get("model", "").strip(), form.get("currency", "").strip().upper()
    amounts = {name: _amount(form.get(name, "")) for name in ("input", "cached", "output")}
    if problem := price_problem(model, currency, amounts):
        raise bad_request(problem)
    return Price(model=model, since_ms=wall_ms(), currency=currency, **amounts)


def _amount(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _lines(
    names: Sequence[str],
    totals: Sequence[TenantTotals],
    usage: Mapping[str, TenantUsage],
    ttft: Mapping[str, Latency],
    keyring: Keyring,
) -> list[TenantLine]:
    weights = {
        name: max((figures.weight for figures in totals if figures.tenant == name), default=1.0) for name in names
    }
    tokens = sum(figures.tokens for figures in usage.values())
    return [
        TenantLine(
            name=name,
            waiting=sum(figures.waiting for figures in totals if figures.tenant == name),
            weight=weights[name],
            usage=usage.get(name, TenantUsage()),
            token_share=usage.get(name, TenantUsage()).tokens / tokens if tokens else None,
            weight_share=weights[name] / sum(weights.values()),
            ttft=ttft.get(name, Latency()),
            limits=_limits(keyring, name),
            in_queues=tuple(
                figures
                for figures in totals
                if figures.tenant == name and (figures.max_running, figures.tokens_per_minute) != (None, None)
            ),
        )
        for name in names
    ]


def _limits(keyring: Keyring, tenant: str) -> str:
    """Return the limits of a tenant's active keys; each key has its own."""
    limits = {
        f"{'any' if key.rpm is None else format(key.rpm, ',')} / {'any' if key.tpm is None else format(key.tpm, ',')}"
        for key in keyring.active_keys_of(tenant)
    }
    return ", ".join(sorted(limits)) or "no key"
