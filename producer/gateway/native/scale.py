"""Show how many workers the queues need: as JSON for one queue, and as metrics for all."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.producer.contract.scaling.backlog import backlog_of
from sluice.producer.contract.scaling.demand import DEFAULT_WITHIN_S, MAX_WORKERS, Scale, ScalePolicy, scale_of
from sluice.producer.errors import InvalidSetting
from sluice.producer.gateway.errors import bad_request
from sluice.producer.gateway.native.query import read_number, read_seconds
from sluice.producer.gateway.native.search import Search
from sluice.producer.gateway.openapi.routes import Answer, ApiRoute, Parameter, RouteDoc, json_answer
from sluice.producer.gateway.openapi.schemas import schema_of
from sluice.producer.gateway.queues import QueueClients
from sluice.producer.gateway.refusals import refusal_lines

SCOPE = "metrics"
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNT = {"type": "integer", "minimum": 0, "maximum": MAX_WORKERS}
POLICY = (
    Parameter(
        name="within_s",
        place="query",
        description=f"Time to clear the backlog, in seconds. Default: {DEFAULT_WITHIN_S:g}.",
        schema={"type": "number", "exclusiveMinimum": 0},
    ),
    Parameter(name="min", place="query", description="Least number of workers. Default: 0.", schema=COUNT),
    Parameter(name="max", place="query", description="Largest number of workers. Default: 100.", schema=COUNT),
)
SCALE_DOC = RouteDoc(
    tag="queues",
    summary="Show the backlog of a queue in tokens, and how many workers it needs",
    answers={200: json_answer("Both.", schema_of(Scale))},
    errors=(404,),
    parameters=(Parameter(name="queue", place="path", description="Name of a queue."), *POLICY),
)
METRICS_DOC = RouteDoc(
    tag="gateway",
    summary="Show the same of every queue as metrics for Prometheus, and refusals of this gateway",
    answers={
        200: Answer(
            description="Gauges with the label queue, and a counter with the label bound.",
            content={"text/plain": {"type": "string"}},
        )
    },
    parameters=POLICY,
)
GAUGES = (
    ("backlog_jobs", "backlog_jobs", "Jobs that could start now."),
    ("backlog_tokens", "backlog_tokens", "Tokens that they reserve."),
    ("running_jobs", "running_jobs", "Jobs that a worker holds."),
    ("running_tokens", "running_tokens", "Reserved tokens that they have not used up."),
    ("workers", "workers", "Living workers."),
    ("worker_tokens_per_second", "worker_tokens_per_s", "Reserved tokens a second of one worker that is full."),
    ("oldest_age_seconds", "oldest_age_s", "Age of the oldest waiting job."),
    ("nearest_deadline_seconds", "nearest_deadline_s", "Time until the first job is too late."),
    ("paused", "is_paused", "1 while the queue is paused."),
    ("wanted_workers", "wanted_workers", "Workers that clear the backlog in time."),
)
"""Name, field of `Scale` and help. A field without a value is left out."""


class ScaleRoutes:
    """The routes of the number of workers."""

    def __init__(self, search: Search) -> None:
        self._search = search

    def routes(self) -> Iterator[ApiRoute]:
        """Yield the routes."""
        yield ApiRoute("GET", "/queues/{queue}/scale", self.scale, SCALE_DOC, scope=SCOPE)
        yield ApiRoute("GET", "/metrics", self.metrics, METRICS_DOC, scope=SCOPE)

    async def scale(self, request: Request) -> Response:
        """Show one queue.

        Raises:
            HttpError: 404, the gateway serves no such queue. 400, a parameter is wrong.
            QueueUnreachable: the server does not answer.
        """
        policy = read_policy(request)
        return JSONResponse(asdict(await _scale_of(self._search.queue(request.path_params["queue"]), policy)))

    async def metrics(self, request: Request) -> Response:
        """Show all queues.

        Raises:
            HttpError: 400, a parameter is wrong.
            QueueUnreachable: the server does not answer.
        """
        policy = read_policy(request)
        scales = await asyncio.gather(*(_scale_of(queue, policy) for queue in self._search.all_queues()))
        return Response("".join(chain(lines_of(scales), refusal_lines())), media_type=MEDIA_TYPE)


def read_policy(request: Request) -> ScalePolicy:
    """Return what a query says of the number of workers.

    Raises:
        HttpError: 400, a parameter is wrong.
    """
    within_s = read_seconds(request, "within_s")
    try:
        return ScalePolicy(
            within_s=DEFAULT_WITHIN_S if within_s is None else within_s,
            min_workers=read_number(request, "min", 0, least=0, most=MAX_WORKERS),
            max_workers=read_number(request, "max", 100, least=0, most=MAX_WORKERS),
        )
    except InvalidSetting as error:
        raise bad_request(str(error)) from error


def lines_of(scales: Iterable[Scale]) -> Iterator[str]:
    """Yield the lines of the metrics, in the text format of Prometheus."""
    found = list(scales)
    for name, field, about in GAUGES:
        yield f"# HELP sluice_scale_{name} {about}\n# TYPE sluice_scale_{name} gauge\n"
        for scale in found:
            value: float | None = getattr(scale, field)
            if value is not None:
                queue = scale.queue.replace("\\", r"\\").replace('"', r"\"")
                yield f'sluice_scale_{name}{{queue="{queue}"}} {float(value):g}\n'


async def _scale_of(queue: QueueClients, policy: ScalePolicy) -> Scale:
    return scale_of(backlog_of(queue.name, await queue.partitions.surveys()), policy)
