"""The routes of batches: /v1/batches."""

import json
import logging
from collections.abc import Mapping
from typing import cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway.access import caller_of
from sluice.gateway.batches.batch import CANCELLED, CANCELLING, OPEN, StoredBatch, printable, window_of
from sluice.gateway.batches.store import BatchStore, TooManyBatches
from sluice.gateway.errors import HttpError, bad_request
from sluice.gateway.files.hosts import lacks_callbacks, without_callbacks
from sluice.gateway.files.routes import not_found
from sluice.gateway.files.storage import Storage
from sluice.gateway.files.store import INPUT, File, FileStore
from sluice.gateway.listing import AFTER, ORDER, SHORT_LIMIT, list_body, page_schema, read_page
from sluice.gateway.openapi.routes import JSON, json_answer, route
from sluice.gateway.openapi.schemas import METADATA, NUMBER, TEXT, Schema, list_of, object_schema, or_null
from sluice.gateway.queues import QueueClients, Queues
from sluice.gateway.refusals import refusal
from sluice.gateway.requests import read_json
from sluice.gateway.tables.pages import new_name
from sluice.gateway.tables.quota import Quota
from sluice.gateway.threads import FILES, SQL
from sluice.producer.errors import InvalidSetting
from sluice.protocol.bounds import TENANT_BATCHES
from sluice.protocol.bulk_files.input import lines
from sluice.protocol.clock import wall_ms
from sluice.protocol.limits import MAX_METADATA_KEY_CHARS, MAX_METADATA_PAIRS, MAX_METADATA_VALUE_CHARS
from sluice.protocol.openai_format.bodies import Object
from sluice.protocol.openai_format.requests import LINE_ENDPOINTS, Endpoint

LOG = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024
FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")


OPTIONAL_TIME: Schema = or_null(NUMBER)
FAULT = object_schema("BatchError", code=TEXT, message=TEXT, param=or_null(TEXT), line=or_null(NUMBER))
BATCH = object_schema(
    "Batch",
    optional=("warning",),
    id=TEXT,
    object={"const": "batch"},
    endpoint={"enum": list(LINE_ENDPOINTS)},
    model=or_null(TEXT),
    errors=or_null(object_schema(object={"const": "list"}, data=list_of(FAULT))),
    input_file_id=TEXT,
    completion_window=TEXT,
    status=TEXT,
    output_file_id=or_null(TEXT),
    error_file_id=or_null(TEXT),
    created_at=NUMBER,
    expires_at=NUMBER,
    in_progress_at=OPTIONAL_TIME,
    finalizing_at=OPTIONAL_TIME,
    completed_at=OPTIONAL_TIME,
    failed_at=OPTIONAL_TIME,
    expired_at=OPTIONAL_TIME,
    cancelling_at=OPTIONAL_TIME,
    cancelled_at=OPTIONAL_TIME,
    request_counts=object_schema(total=NUMBER, completed=NUMBER, failed=NUMBER),
    metadata=or_null(METADATA),
    warning={"type": "string", "description": "Why the batch makes no progress now."},
)
NEW_BATCH = object_schema(
    "NewBatch",
    optional=("metadata",),
    input_file_id=TEXT,
    endpoint={"enum": list(LINE_ENDPOINTS)},
    completion_window={"type": "string", "description": "A number of hours or days, such as 24h or 7d."},
    metadata=METADATA,
)


class BatchRoutes:
    """The routes of batches. SQL and storage are used on threads."""

    def __init__(
        self, batches: BatchStore, files: FileStore, storage: Storage, queues: Queues, quota: Quota, *, max_open: int
    ) -> None:
        """Serve the batches of `queues`. `max_open`: most open batches of a tenant."""
        self._batches, self._files, self._storage = batches, files, storage
        self._queues, self._quota, self._max_open = queues, quota, max_open

    @route(
        "POST /v1/batches",
        json_answer("The batch.", BATCH),
        tag="batches",
        scope="submit",
        errors=(404,),
        body={JSON: NEW_BATCH},
    )
    async def create(self, request: Request) -> Response:
        """Create a batch."""
        fields = _fields(await read_json(request, MAX_BODY_BYTES))
        tenant = caller_of(request).tenant
        await self._quota.check(tenant)  # the outputs of the batch will be stored, too
        file = await self._input(_text(fields, "input_file_id"), tenant)
        endpoint, window = _endpoint(fields), _text(fields, "completion_window")
        length = window_of(window)
        if length is None:
            raise bad_request(
                f"completion_window must be a time such as 24h or 7d, got {window[:64]!r}", param="completion_window"
            )
        model = await FILES.run(_first_model, self._storage, file)
        clients = await self._queue_of(model)
        queue = clients.submitting.target
        created_ms = wall_ms()
        batch = StoredBatch(
            id=f"batch_{new_name(created_ms)}",
            tenant=tenant,
            queue=queue.name,
            partitions=queue.partitions,
            endpoint=endpoint,
            model=model,
            input_file=file.id,
            window=window,
            metadata=_metadata(fields.get("metadata")),
            created_ms=created_ms,
            expires_ms=created_ms + round(length.total_seconds() * 1000),
        )
        await self._add(batch)
        body = await self._body(batch)
        if "warning" in body:
            LOG.warning("A batch was created, but %s.", body["warning"])
        return JSONResponse(body)

    async def _body(self, batch: StoredBatch) -> Object:
        """Return a batch as clients read it, with a warning if no callbacks process continues it."""
        queue = next((clients for clients in self._queues if clients.name == batch.queue), None)
        if batch.status not in OPEN or queue is None or not await lacks_callbacks(queue):
            return batch.body
        return {**batch.body, "warning": without_callbacks(queue.name)}

    async def _add(self, batch: StoredBatch) -> None:
        try:
            is_added = await SQL.run(self._batches.add, batch, max_open=self._max_open)
        except TooManyBatches as error:
            raise refusal(TENANT_BATCHES, str(error)) from error
        if not is_added:
            raise _no_file(batch.input_file)

    async def _queue_of(self, model: str | None) -> QueueClients:
        try:
            return await self._queues.of_model(model)
        except HttpError as error:
            message = f"the first line of the file: {error}"
            raise HttpError(400, error.kind, message, error.code, param=FIELDS[0]) from error

    async def _input(self, file_id: str, tenant: str) -> File:
        file = await SQL.run(self._files.get, file_id, tenant)
        if file is None:
            raise _no_file(file_id)
        if file.purpose != INPUT:
            raise bad_request(f"the file {file.id} has the purpose {file.purpose!r}, not {INPUT!r}", param=FIELDS[0])
        return file

    @route(
        "GET /v1/batches",
        json_answer("One page.", page_schema("Batches", BATCH)),
        tag="batches",
        scope="read",
        parameters=(AFTER, SHORT_LIMIT, ORDER),
    )
    async def list_batches(self, request: Request) -> Response:
        """List batches."""
        query = read_page(request, caller_of(request).tenant, SHORT_LIMIT)
        batches, has_more = await SQL.run(self._batches.page, query)
        return JSONResponse(list_body([batch.body for batch in batches], has_more=has_more))

    @route("GET /v1/batches/{batch_id}", json_answer("The batch.", BATCH), tag="batches", scope="read")
    async def retrieve(self, request: Request) -> Response:
        """Describe a batch."""
        batch_id = request.path_params["batch_id"]
        batch = await SQL.run(self._batches.get, batch_id, caller_of(request).tenant)
        if batch is None:
            raise not_found("batch", batch_id)
        return JSONResponse(await self._body(batch))

    @route(
        "POST /v1/batches/{batch_id}/cancel",
        json_answer("The batch.", BATCH),
        tag="batches",
        scope="control",
        errors=(409,),
    )
    async def cancel(self, request: Request) -> Response:
        """Cancel a batch."""
        batch_id = request.path_params["batch_id"]
        batch = await SQL.run(self._batches.cancel, batch_id, caller_of(request).tenant)
        if batch is None:
            raise not_found("batch", batch_id)
        if batch.status not in (CANCELLING, CANCELLED):
            raise bad_request(
                f"a batch that is {batch.status} cannot be cancelled", code="batch_not_cancellable", status=409
            )
        return JSONResponse(batch.body)


def _fields(body: object) -> Mapping[str, object]:
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    fields = {name: value for name, value in cast("dict[str, object]", body).items() if value is not None}
    if unknown := sorted(fields.keys() - {*FIELDS}):
        name = unknown[0][:64]
        raise bad_request(f"the parameter {name!r} is not supported", code="unknown_parameter", param=name)
    return fields


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        code = "missing_required_parameter" if value is None else "invalid_request"
        raise bad_request(f"{name} must be text", code=code, param=name)
    return value


def _endpoint(fields: Mapping[str, object]) -> Endpoint:
    name = _text(fields, "endpoint")
    for endpoint in LINE_ENDPOINTS:
        if name == endpoint:
            return endpoint
    raise bad_request(f"endpoint must be one of {' and '.join(LINE_ENDPOINTS)}, got {name[:64]!r}", param="endpoint")


def _metadata(value: object) -> Mapping[str, str] | None:
    if value is None:
        return None
    pairs = cast("dict[str, object]", value) if isinstance(value, dict) else {"": None}
    are_sound = len(pairs) <= MAX_METADATA_PAIRS and all(map(_is_pair, pairs.items()))
    if not are_sound:
        raise bad_request(
            f"metadata is up to {MAX_METADATA_PAIRS} pairs of text, of up to {MAX_METADATA_KEY_CHARS} and "
            f"{MAX_METADATA_VALUE_CHARS} characters",
            param="metadata",
        )
    return cast("dict[str, str]", pairs)


def _is_pair(pair: tuple[str, object]) -> bool:
    name, value = pair
    is_name = 0 < len(name) <= MAX_METADATA_KEY_CHARS and "\0" not in name
    return is_name and isinstance(value, str) and len(value) <= MAX_METADATA_VALUE_CHARS and "\0" not in value


def _no_file(file_id: str) -> HttpError:
    return bad_request(f"there is no file {file_id[:64]!r}", code="file_not_found", param="input_file_id")


def _first_model(storage: Storage, file: File) -> str | None:
    """Return the model of the first request of a file, if it names one. An invalid request fails the batch later."""
    try:
        with storage.reading(file.objects[0].key) as opened:
            _, line = next(lines(opened))
        first: Object = json.loads(line or b"")
        model = first["body"]["model"]
    except (StopIteration, InvalidSetting, ValueError, KeyError, TypeError, RecursionError):
        return None
    return printable(model) if isinstance(model, str) else None
