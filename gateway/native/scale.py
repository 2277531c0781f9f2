"""Show how many workers the queues need: as JSON for one queue, and as metrics for all."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway.access import caller_of
from sluice.gateway.errors import bad_request
from sluice.gateway.log.requests import ANSWERED
from sluice.gateway.native.search import queue_named
from sluice.gateway.openapi.routes import Answer, json_answer, route, seconds, whole_number
from sluice.gateway.openapi.schemas import TEXT, schema_of
from sluice.gateway.queues import QueueClients, Queues
from sluice.gateway.refusals import refusal_lines
from sluice.producer.errors import InvalidSetting
from sluice.producer.operations.totals import TenantTotals, tenant_totals
from sluice.protocol.metrics import METRICS, text_of
from sluice.protocol.scaling.backlog import backlog_of
from sluice.protocol.scaling.demand import DEFAULT_WITHIN_S, MAX_WORKERS, Demand, ScalePolicy, scale_of

SCOPE = "metrics"
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WITHIN = seconds(
    "within_s",
    f"Time to clear the backlog, in seconds. Default: {DEFAULT_WITHIN_S:g}.",
    default=DEFAULT_WITHIN_S,
    is_positive=True,
)
MIN = whole_number("min", "Least number of workers.", default=0, most=MAX_WORKERS)
MAX = whole_number("max", "Largest number of workers.", default=100, most=MAX_WORKERS)
POLICY = (WITHIN, MIN, MAX)
FIELDS = {
    "scale_backlog_jobs": "backlog_jobs",
    "scale_backlog_tokens": "backlog_tokens",
    "scale_running_jobs": "running_jobs",
    "scale_running_tokens": "running_tokens",
    "scale_workers": "workers",
    "scale_worker_tokens_per_second": "worker_tokens_per_s",
    "scale_oldest_age_seconds": "oldest_age_s",
    "scale_nearest_deadline_seconds": "nearest_deadline_s",
    "scale_paused": "is_paused",
    "scale_wanted_workers": "wanted_workers",
}
"""Field of `Demand` by metric. A metric without a value is left out."""


class ScaleRoutes:
    """The routes of the number of workers."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    @route(
        "GET /queues/{queue}/scale",
        json_answer("Backlog and number of workers.", schema_of(Demand)),
        tag="queues",
        scope=SCOPE,
        parameters=POLICY,
    )
    async def scale(self, request: Request) -> Response:
        """Show the backlog of a queue in tokens, and how many workers it needs.

        Raises:
            HttpError: 404, the gateway does not serve this queue. 400, a parameter is wrong.
            QueueUnreachable: the server does not answer.
        """
        policy = read_policy(request)
        return JSONResponse(asdict(await _scale_of(queue_named(self._queues, request.path_params["queue"]), policy)))

    @route(
        "GET /metrics",
        Answer(description="For Prometheus, in its text format.", content={"text/plain": TEXT}),
        tag="gateway",
        scope=SCOPE,
        parameters=POLICY,
    )
    async def metrics(self, request: Request) -> Response:
        """Show backlogs, wanted workers and waiting jobs of all queues, and requests of this gateway, as metrics.

        Raises:
            HttpError: 400, a parameter is wrong.
            QueueUnreachable: the server does not answer.
        """
        policy = read_policy(request)
        queues, shows_tenants = list(self._queues), caller_of(request).may("admin")
        surveys = await asyncio.gather(*(queue.partitions.surveys(has_lanes=shows_tenants) for queue in queues))
        by_queue = {queue.name: views for queue, views in zip(queues, surveys, strict=True)}
        scales = [scale_of(backlog_of(name, views), policy) for name, views in by_queue.items()]
        tenants = [tenant for name, views in by_queue.items() for tenant in tenant_totals(name, views) if shows_tenants]
        lines = chain(lines_of(scales), _tenant_lines(tenants), _answer_lines(), refusal_lines())
        return Response("".join(lines), media_type=MEDIA_TYPE)


def read_policy(request: Request) -> ScalePolicy:
    """Read the scaling policy from a request's query.

    Raises:
        HttpError: 400, a parameter is wrong.
    """
    try:
        return ScalePolicy(within_s=WITHIN.read(request), min_workers=MIN.read(request), max_workers=MAX.read(request))
    except InvalidSetting as error:
        raise bad_request(str(error)) from error


def lines_of(scales: Iterable[Demand]) -> Iterator[str]:
    """Yield the lines of the metrics, in the text format of Prometheus."""
    demands = list(scales)
    for name, field in FIELDS.items():
        values: list[tuple[str, float | None]] = [(scale.queue, getattr(scale, field)) for scale in demands]
        yield from text_of(METRICS[name], [((queue,), value) for queue, value in values if value is not None])


def _tenant_lines(tenants: Iterable[TenantTotals]) -> Iterator[str]:
    totals = list(tenants)
    yield from text_of(METRICS["tenant_waiting_jobs"], [((row.queue, row.tenant), row.waiting) for row in totals])
    yield from text_of(METRICS["tenant_waiting_tokens"], [((row.queue, row.tenant), row.tokens) for row in totals])


def _answer_lines() -> Iterator[str]:
    answered = sorted(ANSWERED.items())
    return text_of(METRICS["gateway_requests"], [((status,), number) for status, number in answered])


async def _scale_of(queue: QueueClients, policy: ScalePolicy) -> Demand:
    return scale_of(backlog_of(queue.name, await queue.partitions.surveys()), policy)
