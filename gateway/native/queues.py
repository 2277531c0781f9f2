"""Show queues, and the shares of tenants in them."""

import asyncio
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway.native.search import QUEUE, asked_queues, queue_named
from sluice.gateway.openapi.routes import json_answer, route
from sluice.gateway.openapi.schemas import NUMBER, TEXT, Schema, list_of, object_schema, schema_of
from sluice.gateway.queues import Queues
from sluice.producer.operations.totals import QueueTotals, TenantTotals, queue_totals, tenant_totals
from sluice.protocol.calls import QueueView

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
QUEUE_BODY = object_schema("Queue", **TOTALS["properties"], partitions=list_of(PARTITION_BODY))


class QueueRoutes:
    """The routes of queues and tenants."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

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
        """List tenants with waiting jobs or a weight, with their shares.

        Raises:
            HttpError: 404, the gateway does not serve this queue.
            QueueUnreachable: the server does not answer.
        """
        by_queue = await self._views(request)
        totals = [tenant for name, views in by_queue for tenant in tenant_totals(name, views)]
        return JSONResponse({"data": list(map(asdict, totals))})

    async def _views(self, request: Request) -> list[tuple[str, list[QueueView]]]:
        queues = asked_queues(self._queues, request)
        views = await asyncio.gather(*(queue.submitting.queue() for queue in queues))
        return [(queue.name, view) for queue, view in zip(queues, views, strict=True)]


def _held(tenant: str, jobs: int, tokens: int, num_bytes: int) -> dict[str, object]:
    return {"tenant": tenant, "jobs": jobs, "tokens": tokens, "bytes": num_bytes}


def _lane(kind: str, tenant: str, jobs: int, tokens: int) -> dict[str, object]:
    return {"priority": kind, "tenant": tenant, "jobs": jobs, "tokens": tokens}
