"""The routes of files: /v1/files."""

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sluice.gateway.access import caller_of
from sluice.gateway.arrival.shares import share_of
from sluice.gateway.errors import HttpError, bad_request
from sluice.gateway.files.storage import Storage
from sluice.gateway.files.store import INPUT, PREFIX, UPLOADS, File, FileStore, Stored, new_file_id
from sluice.gateway.files.upload import announced_bytes, receive
from sluice.gateway.listing import AFTER, FILES_LIMIT, ORDER, list_body, page_schema, read_page
from sluice.gateway.openapi.routes import Answer, json_answer, route, text
from sluice.gateway.openapi.schemas import NUMBER, TEXT, object_schema
from sluice.gateway.tables.quota import Incoming, Quota
from sluice.gateway.threads import FILES, SQL
from sluice.protocol.clock import wall_ms

FILE = object_schema(
    "File",
    id=TEXT,
    object={"const": "file"},
    bytes=NUMBER,
    created_at=NUMBER,
    filename=TEXT,
    purpose=TEXT,
    status={"const": "processed"},
)
FORM = object_schema("Upload", file={"type": "string", "format": "binary"}, purpose={"const": "batch"})
DELETED = object_schema("DeletedFile", id=TEXT, object={"const": "file"}, deleted={"const": True})
PURPOSE = text("purpose", "Only files with this purpose.")


class FileRoutes:
    """The routes of files. SQL and storage are used on threads."""

    def __init__(self, store: FileStore, storage: Storage, max_file_bytes: int, quota: Quota) -> None:
        self._store, self._storage, self._max_file_bytes, self._quota = store, storage, max_file_bytes, quota

    @route(
        "POST /v1/files",
        json_answer("The file.", FILE),
        tag="batches",
        scope="submit",
        body={"multipart/form-data": FORM},
    )
    async def upload(self, request: Request) -> Response:
        """Store a file."""
        with self._quota.receiving(caller_of(request).tenant) as incoming:
            await incoming.announce(announced_bytes(request))
            return JSONResponse((await self._store_upload(request, incoming)).body)

    async def _store_upload(self, request: Request, incoming: Incoming) -> File:
        created_ms = wall_ms()
        file_id = new_file_id(created_ms)
        key = f"{UPLOADS}/{file_id.removeprefix(PREFIX)}"
        uploaded = await receive(request, self._storage, key, self._max_file_bytes, incoming)
        file = File(
            id=file_id,
            tenant=caller_of(request).tenant,
            purpose=INPUT,
            filename=uploaded.filename,
            objects=(Stored(key=key, num_bytes=uploaded.num_bytes),),
            created_ms=created_ms,
        )
        try:
            _check(uploaded.fields)
            # If the database fails, the row may have been written; if not, a sweep deletes the object.
            await self._quota.add(self._store.add, file)
        except HttpError:
            await FILES.run(self._storage.delete, [key])
            raise
        return file

    @route(
        "GET /v1/files",
        json_answer("One page.", page_schema("Files", FILE)),
        tag="batches",
        scope="read",
        parameters=(AFTER, FILES_LIMIT, ORDER, PURPOSE),
    )
    async def list_files(self, request: Request) -> Response:
        """List files."""
        page, purpose = read_page(request, caller_of(request).tenant, FILES_LIMIT), PURPOSE.read(request) or None
        files, has_more = await SQL.run(self._store.page, page, purpose)
        return JSONResponse(list_body([file.body for file in files], has_more=has_more))

    @route("GET /v1/files/{file_id}", json_answer("The file.", FILE), tag="batches", scope="read")
    async def retrieve(self, request: Request) -> Response:
        """Describe a file."""
        return JSONResponse((await self._file(request)).body)

    @route(
        "GET /v1/files/{file_id}/content",
        Answer(description="The content of the file.", content={"application/octet-stream": {}}),
        tag="batches",
        scope="read",
    )
    async def content(self, request: Request) -> Response:
        """Download a file."""
        file = await self._file(request)
        share_of(request).reserve(self._storage.buffer_bytes)
        pieces = pieces_of(self._storage, file)
        first = await anext(pieces, b"")  # an unreachable storage is an error, not a truncated response

        async def content() -> AsyncIterator[bytes]:
            yield first
            async for piece in pieces:
                yield piece

        headers = {"content-length": str(file.num_bytes)}
        return StreamingResponse(content(), headers=headers, media_type="application/octet-stream")

    @route(
        "DELETE /v1/files/{file_id}",
        json_answer("The file is deleted.", DELETED),
        tag="batches",
        scope="control",
        errors=(409,),
    )
    async def delete(self, request: Request) -> Response:
        """Delete a file."""
        file_id = request.path_params["file_id"]
        file = await SQL.run(self._store.delete, file_id, caller_of(request).tenant)
        if file is None:
            raise not_found("file", file_id)
        await FILES.run(self._storage.delete, [part.key for part in file.objects])
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> File:
        file_id = request.path_params["file_id"]
        file = await SQL.run(self._store.get, file_id, caller_of(request).tenant)
        if file is None:
            raise not_found("file", file_id)
        return file


async def pieces_of(storage: Storage, file: File) -> AsyncIterator[bytes]:
    """Yield the content of a file."""
    for part in file.objects:
        pieces = storage.pieces(part.key)
        while piece := await FILES.run(next, pieces, b""):
            yield piece


def not_found(kind: str, name: str) -> HttpError:
    """Return the error for an id that this tenant does not have."""
    return bad_request(f"there is no {kind} {name[:64]!r}", code="not_found", param="id", status=404)


def _check(fields: dict[str, str]) -> None:
    """Check the fields of an upload.

    Raises:
        HttpError: the purpose is not supported, or a field is unknown.
    """
    if fields.get("purpose") != INPUT:
        raise bad_request(f"purpose must be {INPUT!r}, got {fields.get('purpose', '')[:64]!r}", param="purpose")
    if unknown := sorted(fields.keys() - {"purpose"}):
        raise bad_request(f"the field {unknown[0][:64]!r} is not supported", code="unsupported", param=unknown[0][:64])
