"""The list of jobs, with filters."""

from collections.abc import Iterator
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.gateway.queues import Queues
from sluice.gateway.tables.database import Database
from sluice.gateway.threads import HISTORY
from sluice.gateway.ui.frame import Frame, render
from sluice.gateway.ui.read.joblist import SPANS, page_of_jobs, read_query
from sluice.gateway.ui.visitors import Visitor
from sluice.protocol.limits import MAX_PRIORITY
from sluice.protocol.states import RECORDED

PATH = "/ui/jobs"


class JobsPage:
    """The list of jobs. It is read from the history, so a job is in it once it was recorded."""

    def __init__(self, frame: Frame, queues: Queues, database: Database) -> None:
        self._frame, self._queues, self._database = frame, queues, database

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        yield self._frame.page(PATH, self._show)

    async def _show(self, request: Request, visitor: Visitor) -> Response:
        names = [queue.name for queue in self._queues]
        query = read_query(request.query_params, names, visitor.tenant)
        lines, following = await HISTORY.run(page_of_jobs, self._database, query)
        older = None if following is None else f"{PATH}?{urlencode({**query.parameters, 'after': following})}"
        return render(
            request,
            "jobs.html",
            jobs=lines,
            query=query,
            queues=names,
            states=RECORDED,
            spans=list(SPANS),
            priorities=range(MAX_PRIORITY + 1),
            older=older,
            newest=None if query.after is None else f"{PATH}?{urlencode(query.parameters)}",
            is_filtered=bool(query.parameters.keys() - ({"tenant"} if visitor.tenant else set())),
        )
