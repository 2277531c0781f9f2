"""Batches: progress, rate and time left, errors by kind, downloads."""

from collections.abc import AsyncIterator, Iterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sluice.gateway.files.hosts import lacks_callbacks
from sluice.gateway.files.routes import not_found, pieces_of
from sluice.gateway.files.storage import Storage
from sluice.gateway.files.store import FileStore
from sluice.gateway.queues import Queues
from sluice.gateway.tables.database import Database
from sluice.gateway.threads import HISTORY, SQL
from sluice.gateway.ui.frame import Frame, render
from sluice.gateway.ui.live import Live, Parts
from sluice.gateway.ui.read.batches import errors_of, one_batch, tenant_of_batch
from sluice.gateway.ui.read.batchlist import BatchList
from sluice.gateway.ui.templates import fragment
from sluice.gateway.ui.visitors import Visitor

PATH = "/ui/batches"
PUSH_EVERY_S = 2.0


class BatchPages:
    """The list, the page of one batch with its live stream, and the downloads."""

    def __init__(self, frame: Frame, live: Live, queues: Queues, database: Database, storage: Storage) -> None:
        self._frame, self._live, self._queues = frame, live, queues
        self._database, self._storage, self._files = database, storage, FileStore(database)
        self._newest = BatchList(database, [queue.name for queue in queues])

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        path = f"{PATH}/{{queue}}/{{batch}}"
        yield self._frame.page(PATH, self._list)
        yield self._frame.page(path, self._show)
        yield self._live.route(f"{path}/events", self._events)
        yield self._frame.page(f"{path}/{{kind}}.jsonl", self._download)

    async def _list(self, request: Request, visitor: Visitor) -> Response:
        batches, num_left = await self._newest.get(visitor.tenant)
        return render(request, "batches.html", batches=batches, num_left=num_left)

    async def _show(self, request: Request, visitor: Visitor) -> Response:
        queue, batch_id = self._asked(request)
        parts = await self._parts(queue, batch_id, visitor)
        return render(request, "batch.html", queue=queue, batch_id=batch_id, parts=parts)

    async def _events(self, request: Request, visitor: Visitor) -> AsyncIterator[bytes]:
        queue, batch_id = self._asked(request)

        async def read() -> Parts:
            return await self._parts(queue, batch_id, visitor)

        return self._live.parts(request, visitor, read, PUSH_EVERY_S)

    async def _parts(self, queue: str, batch_id: str, visitor: Visitor) -> Parts:
        line = await HISTORY.run(one_batch, self._database, queue, batch_id, visitor.tenant)
        errors = await HISTORY.run(errors_of, self._database, queue, batch_id, visitor.tenant)
        if line is None:
            raise not_found("batch", batch_id)
        clients = next(candidate for candidate in self._queues if candidate.name == queue)
        is_stalled = line.is_open and await lacks_callbacks(clients)
        return {"batch": fragment("parts/batch.html", batch=line, errors=errors, is_stalled=is_stalled)}

    async def _download(self, request: Request, visitor: Visitor) -> Response:
        queue, batch_id = self._asked(request)
        line = await HISTORY.run(one_batch, self._database, queue, batch_id, visitor.tenant)
        kind = request.path_params["kind"]
        file_id = None if line is None else {"output": line.output_file, "errors": line.error_file}.get(kind)
        tenant = visitor.tenant or await self._tenant_of(batch_id)
        file = None if file_id is None else await SQL.run(self._files.get, file_id, tenant)
        if file is None:
            raise not_found("file", f"{kind}.jsonl")
        name = f'attachment; filename="{file.id}.jsonl"'
        headers = {"content-length": str(file.num_bytes), "content-disposition": name}
        return StreamingResponse(pieces_of(self._storage, file), headers=headers, media_type="application/jsonl")

    async def _tenant_of(self, batch_id: str) -> str:
        return await SQL.run(tenant_of_batch, self._database, batch_id) or ""

    def _asked(self, request: Request) -> tuple[str, str]:
        queue, batch_id = request.path_params["queue"], request.path_params["batch"]
        if queue not in {queue_clients.name for queue_clients in self._queues} or "\0" in batch_id:
            raise not_found("batch", batch_id)
        return queue, batch_id
