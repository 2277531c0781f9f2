"""Schedules: their rules, their last runs and the next ones."""

import asyncio
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.gateway.queues import Queues
from sluice.gateway.ui.frame import Frame, render
from sluice.gateway.ui.visitors import Visitor

PATH = "/ui/schedules"
NUM_NEXT = 3


class SchedulesPage:
    """The page. Without `admin`, a visitor sees its own tenant's."""

    def __init__(self, frame: Frame, queues: Queues) -> None:
        self._frame, self._queues = frame, queues

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        yield self._frame.page(PATH, self._show)

    async def _show(self, request: Request, visitor: Visitor) -> Response:
        own = None if visitor.may("admin") else visitor.caller.tenant
        found = await asyncio.gather(
            *(queue.submitting.schedules(tenant=own, num_next=NUM_NEXT) for queue in self._queues)
        )
        schedules = [(queue.name, view) for queue, views in zip(self._queues, found, strict=True) for view in views]
        return render(request, "schedules.html", schedules=schedules, is_all=own is None)
