"""The first page: queues, workers and alerts; for a key without `admin`, the jobs of its tenant."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.gateway.files.hosts import lacks_callbacks
from sluice.gateway.queues import Queues
from sluice.gateway.tables.database import Database
from sluice.gateway.threads import HISTORY
from sluice.gateway.ui.frame import Frame, render
from sluice.gateway.ui.latest import Latest
from sluice.gateway.ui.live import Live, Parts
from sluice.gateway.ui.read.batches import queues_with_open_batches
from sluice.gateway.ui.read.latencies import counts_of_tenant, ttft_by_queue, ttft_of_tenant
from sluice.gateway.ui.read.overview import Latency, Memory, Overview, Trends, overview
from sluice.gateway.ui.read.surveys import Surveys
from sluice.gateway.ui.templates import fragment
from sluice.gateway.ui.visitors import Visitor
from sluice.producer.errors import ProducerError
from sluice.producer.operations.operation import Ask, Operation, Reply

LATENCY_EVERY_S = 5.0
PUSH_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFigures:
    """A tenant's view of its own jobs."""

    counts: Mapping[str, int]
    ttft: Latency


class OverviewPage:
    """The page, and its live stream."""

    def __init__(self, frame: Frame, live: Live, queues: Queues, surveys: Surveys, database: Database) -> None:
        self._frame, self._live = frame, live
        self._queues, self._database = queues, database
        self._surveys = surveys
        self._trends = Trends()
        self._latest = Latest(self._parts, PUSH_EVERY_S)
        self._own: dict[str, Latest[Parts]] = {}
        self._latencies = Latest(self._read_latencies, LATENCY_EVERY_S)
        self._stalled = Latest(self._read_stalled, LATENCY_EVERY_S)

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        yield self._frame.page("/ui/", self._show)
        yield self._live.route("/ui/events", self._events)

    async def _show(self, request: Request, visitor: Visitor) -> Response:
        template = "overview.html" if visitor.may("admin") else "own_overview.html"
        return render(request, template, parts=await self._parts_for(visitor).get())

    async def _events(self, request: Request, visitor: Visitor) -> AsyncIterator[bytes]:
        return self._live.parts(request, visitor, self._parts_for(visitor).get, PUSH_EVERY_S)

    def _parts_for(self, visitor: Visitor) -> Latest[Parts]:
        """Return the parts, which all visitors with the same rights share."""
        if visitor.may("admin"):
            return self._latest
        tenant = visitor.caller.tenant
        return self._own.setdefault(tenant, Latest(partial(self._own_parts, tenant), PUSH_EVERY_S))

    async def _parts(self) -> Parts:
        overview = await self._read()
        values = {"found": overview}
        return {
            "alerts": fragment("parts/alerts.html", **values),
            "queues": fragment("parts/queues.html", **values),
            "workers": fragment("parts/workers.html", **values),
            "series": json.dumps(overview.series),
        }

    async def _own_parts(self, tenant: str) -> Parts:
        names = [queue.name for queue in self._queues]
        try:
            counts, ttft = await asyncio.gather(
                HISTORY.run(counts_of_tenant, self._database, tenant, names),
                HISTORY.run(ttft_of_tenant, self._database, tenant),
            )
        except ProducerError:
            return {"own": fragment("parts/no_history.html")}
        return {"own": fragment("parts/own.html", own=OwnFigures(counts=counts, ttft=ttft))}

    async def _read(self) -> Overview:
        names = [queue.name for queue in self._queues]
        views = await asyncio.gather(*map(self._surveys.of, self._queues))
        latencies, memory = await self._latencies.get(), await self._memory()
        stalled = await self._stalled.get()
        return overview(dict(zip(names, views, strict=True)), latencies, memory, self._trends, stalled=stalled)

    async def _read_latencies(self) -> Mapping[str, Latency]:
        try:
            return await HISTORY.run(ttft_by_queue, self._database, [queue.name for queue in self._queues])
        except ProducerError:
            return {}

    async def _read_stalled(self) -> Sequence[str]:
        """Return the queues with batches and without a callbacks process."""
        try:
            names = [queue.name for queue in self._queues]
            open_queues = await HISTORY.run(queues_with_open_batches, self._database, names)
        except ProducerError:
            return ()
        return [queue.name for queue in self._queues if queue.name in open_queues and await lacks_callbacks(queue)]

    async def _memory(self) -> Memory | None:
        try:
            return await self._queues.first.submitting.run(_look_at_memory())
        except (ProducerError, ValueError):
            return None  # the user lacks the right to read it, or the server does not report it


def _look_at_memory() -> Operation[Memory]:
    [reply] = yield Ask((("INFO", "memory"),), is_lenient=True)
    facts = _facts(reply)
    return Memory(used_bytes=int(facts["used_memory"]), max_bytes=int(facts.get("maxmemory", "0")))


def _facts(reply: Reply) -> Mapping[str, str]:
    if not isinstance(reply, bytes):
        raise ValueError("the server does not report it")  # noqa: TRY004  # it refused, which is an answer
    pairs = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value.strip() for name, _, value in pairs if value}
