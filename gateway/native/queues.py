"""Show queues, and the shares of tenants in them."""

import asyncio
from dataclasses import asdict
from typing import cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway.access import caller_of
from sluice.gateway.audit import AuditLog
from sluice.gateway.errors import bad_request
from sluice.gateway.native.search import QUEUE, asked_queues, queue_named
from sluice.gateway.openapi.routes import JSON, json_answer, route
from sluice.gateway.openapi.schemas import NUMBER, TEXT, Schema, list_of, object_schema, or_null, schema_of
from sluice.gateway.queues import Queues
from sluice.gateway.requests import read_json
from sluice.gateway.settings import GatewaySettings
from sluice.gateway.tenant_limits import set_limits
from sluice.producer.operations.totals import QueueTotals, TenantTotals, queue_totals, tenant_totals
from sluice.protocol.calls import TENANT_LIMITS, QueueView
from sluice.protocol.limits import MAX_TENANT_LIMIT

TOTALS, TENANT = schema_of(QueueTotals), schema_of(TenantTotals)
PARTITION = schema_of(QueueView)
LANE = object_schema("Lane", priority=TEXT, tenant=TEXT, jobs=NUMBER, tokens=NUMBER)
HELD = object_schema(
    "TenantWaiting",
    tenant=TEXT,
    jobs=NUMBER,
    tokens=NUMBER,
    bytes=NUMBER,
)
PARTITION_BODY: Schema = {
    **PARTITION,
    "properties": {**PARTITION["properties"], "lanes": list_of(LANE), "tenants": list_of(HELD)},
}
LIMIT: Schema = or_null({**NUMBER, "minimum": 0, "maximum": MAX_TENANT_LIMIT})
LIMITS: Schema = {
    **object_schema("TenantLimits", optional=tuple(TENANT_LIMITS), **dict.fromkeys(TENANT_LIMITS, LIMIT)),
    "additionalProperties": False,
}
QUEUE_BODY = object_schema("Queue", **TOTALS["properties"], partitions=list_of(PARTITION_BODY))


class QueueRoutes:
    """The routes of queues and tenants."""

    def __init__(self, queues: Queues, audit: AuditLog, settings: GatewaySettings) -> None:
        self._queues, self._audit, self._max_bytes = queues, audit, settings.max_body_bytes

    @route(
        "GET /queues",
        json_answer("All queues.", object_schema("Queues", data=list_of(TOTALS))),
        tag="queues",
        scope="admin",
    )
    async def list_queues(self, request: Request) -> Response:
        """List the queues that the gateway serves.

        Raises:
            QueueUnreachable: the server does not answer.
        """
        by_queue = await self._views(request)
        return JSONResponse({"data": [asdict(queue_totals(name, views)) for name, views in by_queue]})

    @route("GET /queues/{queue}", json_answer("The queue.", QUEUE_BODY), tag="queues", scope="admin")
    async def show(self, request: Request) -> Response:
        """Show one queue: totals, lanes, workers and settings.

        Raises:
            HttpError: 404, the gateway does not serve this queue.
            QueueUnreachable: the server does not answer.
        """
        queue = queue_named(self._queues, request.path_params["queue"])
        views = await queue.submitting.queue()
        partitions = [
            {
                **asdict(view),
                "lanes": [_lane(*lane) for lane in view.lanes],
                "tenants": [_held(*tenant) for tenant in view.tenants],
            }
            for view in views
        ]
        return JSONResponse({**asdict(queue_totals(queue.name, views)), "partitions": partitions})

    @route(
        "GET /tenants",
        json_answer("By queue and name.", object_schema("Tenants", data=list_of(TENANT))),
        tag="queues",
        scope="admin",
        errors=(404,),
        parameters=(QUEUE,),
    )
    async def tenants(self, request: Request) -> Response:
        """List tenants with waiting jobs, a weight or a limit, with their shares and what is left of their limits.

        Raises:
            HttpError: 404, the gateway does not serve this queue.
            QueueUnreachable: the server does not answer.
        """
        by_queue = await self._views(request)
        totals = [tenant for name, views in by_queue for tenant in tenant_totals(name, views)]
        return JSONResponse({"data": list(map(asdict, totals))})

    @route(
        "POST /tenants/{tenant}/limits",
        json_answer("The tenant in each queue.", object_schema("Tenants", data=list_of(TENANT))),
        tag="queues",
        scope="admin",
        errors=(404, 503),
        parameters=(QUEUE,),
        body={JSON: LIMITS},
    )
    async def limit(self, request: Request) -> Response:
        """Set the limits of a tenant: jobs that run at once, and tokens a minute. One that is left out is removed.

        Raises:
            HttpError: 400, a limit is not valid; 404, the gateway does not serve this queue.
            HistoryUnavailable: the audit log cannot be written, so nothing is changed.
            QueueUnreachable: the server does not answer.
        """
        tenant, limits = request.path_params["tenant"], _limits(await read_json(request, self._max_bytes))
        for queue in asked_queues(self._queues, request):
            await set_limits(self._audit, caller_of(request), queue, tenant, limits)
        totals = [total for name, views in await self._views(request) for total in tenant_totals(name, views)]
        return JSONResponse({"data": [asdict(total) for total in totals if total.tenant == tenant]})

    async def _views(self, request: Request) -> list[tuple[str, list[QueueView]]]:
        queues = asked_queues(self._queues, request)
        views = await asyncio.gather(*(queue.submitting.queue() for queue in queues))
        return [(queue.name, view) for queue, view in zip(queues, views, strict=True)]


def _limits(body: object) -> dict[str, int | None]:
    """Read the limits of a request.

    Raises:
        HttpError: 400, the body is no object of limits.
    """
    given = cast("dict[str, object]", body) if isinstance(body, dict) else None
    if given is None or not given.keys() <= TENANT_LIMITS.keys():
        raise bad_request(f"the body must be an object of {' and '.join(TENANT_LIMITS)}")
    for name, most in given.items():
        # A bool is an int.
        if most is not None and type(most) is not int:
            raise bad_request(f"{name} must be a whole number or null", param=name)
    return {name: cast("int | None", given.get(name)) for name in TENANT_LIMITS}


def _held(tenant: str, jobs: int, tokens: int, num_bytes: int) -> dict[str, object]:
    return {"tenant": tenant, "jobs": jobs, "tokens": tokens, "bytes": num_bytes}


def _lane(kind: str, tenant: str, jobs: int, tokens: int) -> dict[str, object]:
    return {"priority": kind, "tenant": tenant, "jobs": jobs, "tokens": tokens}
