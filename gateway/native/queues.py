"""Show queues, and the shares of tenants in them."""

import asyncio
from collections.abc import Iterator
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway.native.search import QUEUE, Search
from sluice.gateway.openapi.routes import ApiRoute, Parameter, RouteDoc, json_answer
from sluice.gateway.openapi.schemas import Schema, list_of, object_schema, schema_of
from sluice.producer.operations.totals import QueueTotals, TenantTotals, queue_totals, tenant_totals
from sluice.protocol.calls import QueueView

TOTALS, TENANT = schema_of(QueueTotals), schema_of(TenantTotals)
PARTITION = schema_of(QueueView)
LANE = object_schema(
    "Lane", priority={"type": "string"}, tenant={"type": "string"}, jobs={"type": "integer"}, tokens={"type": "integer"}
)
HELD = object_schema(
    "TenantWaiting",
    tenant={"type": "string"},
    jobs={"type": "integer"},
    tokens={"type": "integer"},
    bytes={"type": "integer"},
)
PARTITION_BODY: Schema = {
    **PARTITION,
    "properties": {**PARTITION["properties"], "lanes": list_of(LANE), "tenants": list_of(HELD)},
}
QUEUE_BODY = object_schema("Queue", **TOTALS["properties"], partitions=list_of(PARTITION_BODY))
LIST_DOC = RouteDoc(
    tag="queues",
    summary="List the queues that the gateway serves",
    answers={200: json_answer("All of them.", object_schema("Queues", data=list_of(TOTALS)))},
)
SHOW_DOC = RouteDoc(
    tag="queues",
    summary="Show one queue: totals, lanes, workers and settings",
    answers={200: json_answer("The queue.", QUEUE_BODY)},
    errors=(404,),
    parameters=(Parameter(name="queue", place="path", description="Name of a queue."),),
)
TENANTS_DOC = RouteDoc(
    tag="queues",
    summary="List tenants that wait or have a weight, with their shares",
    answers={200: json_answer("By queue and name.", object_schema("Tenants", data=list_of(TENANT)))},
    errors=(404,),
    parameters=(QUEUE,),
)


class QueueRoutes:
    """The routes of queues and tenants."""

    def __init__(self, search: Search) -> None:
        self._search = search

    def routes(self) -> Iterator[ApiRoute]:
        """Yield the routes."""
        yield ApiRoute("GET", "/queues", self.list_queues, LIST_DOC, scope="admin")
        yield ApiRoute("GET", "/queues/{queue}", self.show, SHOW_DOC, scope="admin")
        yield ApiRoute("GET", "/tenants", self.tenants, TENANTS_DOC, scope="admin")

    async def list_queues(self, request: Request) -> Response:
        """List the queues.

        Raises:
            QueueUnreachable: the server does not answer.
        """
        found = await self._views(request)
        return JSONResponse({"data": [asdict(queue_totals(name, views)) for name, views in found]})

    async def show(self, request: Request) -> Response:
        """Show one queue.

        Raises:
            HttpError: 404, the gateway does not serve this queue.
            QueueUnreachable: the server does not answer.
        """
        queue = self._search.queue(request.path_params["queue"])
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

    async def tenants(self, request: Request) -> Response:
        """List the tenants of the queues, or of one.

        Raises:
            HttpError: 404, the gateway does not serve this queue.
            QueueUnreachable: the server does not answer.
        """
        found = await self._views(request)
        return JSONResponse({"data": [asdict(one) for name, views in found for one in tenant_totals(name, views)]})

    async def _views(self, request: Request) -> list[tuple[str, list[QueueView]]]:
        queues = self._search.asked_queues(request)
        views = await asyncio.gather(*(queue.submitting.queue() for queue in queues))
        return [(queue.name, view) for queue, view in zip(queues, views, strict=True)]


def _held(tenant: str, jobs: int, tokens: int, num_bytes: int) -> dict[str, object]:
    return {"tenant": tenant, "jobs": jobs, "tokens": tokens, "bytes": num_bytes}


def _lane(kind: str, tenant: str, jobs: int, tokens: int) -> dict[str, object]:
    return {"priority": kind, "tenant": tenant, "jobs": jobs, "tokens": tokens}
