"""The routes of /v1/responses."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway.access import caller_of
from sluice.gateway.connections.events import EventStream
from sluice.gateway.errors import CLIENT_LEFT_STATUS, HttpError, bad_request, named
from sluice.gateway.listing import AFTER, ORDER, SHORT_LIMIT, list_body, page_schema, read_page
from sluice.gateway.openai.items import Item
from sluice.gateway.openai.response_events import SCHEMAS
from sluice.gateway.openai.response_requests import NAMES, NEW_RESPONSE, read_response_request
from sluice.gateway.openai.responses import (
    INPUT_ITEM,
    RESPONSE,
    ResponseEnd,
    ResponseInfo,
    Status,
    input_item,
    item_id_of,
    response_end,
    response_object,
)
from sluice.gateway.openapi.options import KEY
from sluice.gateway.openapi.routes import EVENT, EVENTS, JSON, Answer, flag, json_answer, route, whole_number
from sluice.gateway.openapi.schemas import TEXT, object_schema
from sluice.gateway.queues import Queues
from sluice.gateway.rates import KeyRates
from sluice.gateway.readers import unless_left
from sluice.gateway.requests import read_json, traceparent_of
from sluice.gateway.responses.creation import Created, Creation, served
from sluice.gateway.responses.ends import output_of, settle
from sluice.gateway.responses.store import LOST, ResponseStore, StoredResponse
from sluice.gateway.responses.streams import ResponseStream, check_place, keep_end
from sluice.gateway.settings import GatewaySettings
from sluice.gateway.tables.pages import PageRequest, unknown_cursor
from sluice.gateway.tables.quota import Quota
from sluice.gateway.threads import SQL
from sluice.producer.errors import JobNotDone, JobNotFound, ResultExpired, ResultTimeout
from sluice.protocol.openai_format.bodies import Object
from sluice.protocol.states import JobState

CANCEL_WAIT_S = 5.0
"""How long a cancel waits for the worker to stop the job."""


MAX_NUMBER_DIGITS = 18


STREAM = Answer(
    description="The response; with `stream` its events.", content={JSON: RESPONSE, EVENTS: EVENT}, events=SCHEMAS
)
DELETED = object_schema("DeletedResponse", id=TEXT, object={"const": "response"}, deleted={"const": True})
IS_STREAM = flag("stream", "Whether to answer with events.")
STARTING_AFTER = whole_number("starting_after", "Number of the last event that the client has.", default=-1)


class ResponseRoutes:
    """The handlers. Each raises HttpError, RequestRefused or ProducerError for a request that it refuses."""

    def __init__(
        self, queues: Queues, rates: KeyRates, settings: GatewaySettings, store: ResponseStore, quota: Quota
    ) -> None:
        self._creation = Creation(queues, rates, settings, store, quota)
        self._queues, self._settings, self._store = queues, settings, store

    @route(
        "POST /v1/responses",
        STREAM,
        tag="responses",
        scope="submit",
        errors=(404, 409, 422, 504),
        parameters=(KEY,),
        body={JSON: NEW_RESPONSE},
    )
    async def create(self, request: Request) -> Response:
        """Create a response."""
        body = await read_json(request, self._settings.max_body_bytes)
        parsed = read_response_request(body)
        parsed = replace(parsed, options={**parsed.options, "traceparent": traceparent_of(request)})
        key = KEY.read(request)
        # the cast: read_response_request accepts only objects
        with named(NAMES):
            created = await self._creation.create(parsed, caller_of(request), cast("dict[str, object]", body), key)
        response = created.response
        request.state.job_id = response.info.job_id
        if parsed.is_stream:
            return EventStream(self._stream(created), created.rates)
        if response.end is not None or parsed.is_background:
            answer = _answer(response, response.end.status if response.end else "queued", response.end)
        else:
            with named(NAMES):
                answer = await self._whole(created, request)
        answer.headers.update(created.rates)
        return answer

    @route(
        "GET /v1/responses/{response_id}", STREAM, tag="responses", scope="read", parameters=(IS_STREAM, STARTING_AFTER)
    )
    async def retrieve(self, request: Request) -> Response:
        """Describe a response, or stream its events."""
        response = await self._own(request)
        if not IS_STREAM.read(request):
            return await self._current(response)
        after = STARTING_AFTER.read(request)
        if after >= 0:
            response = await self._settled(response)
            check_place(response, after)
        queue = None if response.end is not None else served(self._queues, response.queue)
        stream = ResponseStream(response, queue, self._store, after=after)
        return EventStream(stream.events())

    @route(
        "POST /v1/responses/{response_id}/cancel",
        json_answer("The response.", RESPONSE),
        tag="responses",
        scope="control",
    )
    async def cancel(self, request: Request) -> Response:
        """Cancel a response in the background."""
        response = await self._own(request)
        if not response.info.is_background:
            raise bad_request("only a response with background: true can be cancelled", code="not_cancellable")
        if response.end is None:
            await self._cancel(response)
        return await self._current(response)

    @route(
        "DELETE /v1/responses/{response_id}",
        json_answer("The response is deleted.", DELETED),
        tag="responses",
        scope="control",
    )
    async def delete(self, request: Request) -> Response:
        """Delete a response."""
        response = await self._own(request)
        if response.end is None:
            await self._cancel(response)
        # The row is deleted last, so that a client can try again after a failure.
        await served(self._queues, response.queue).submitting.delete([response.info.job_id])
        await SQL.run(self._store.delete, response.info.id)
        return JSONResponse({"id": response.info.id, "object": "response", "deleted": True})

    @route(
        "GET /v1/responses/{response_id}/input_items",
        json_answer("One page.", page_schema("InputItems", INPUT_ITEM)),
        tag="responses",
        scope="read",
        parameters=(AFTER, SHORT_LIMIT, ORDER),
    )
    async def input_items(self, request: Request) -> Response:
        """List the input of a response."""
        response = await self._own(request)
        messages = await SQL.run(self._store.input_of, response.info.id, response.tenant)
        if messages is None:
            raise _unknown()
        page = read_page(request, response.tenant, SHORT_LIMIT)
        items, has_more = _page(response.info, messages, page)
        return JSONResponse(list_body(items, has_more=has_more))

    # ------------------------------------------------------------ one response

    async def _own(self, request: Request) -> StoredResponse:
        """Return the response that a request names, if it belongs to the caller.

        Raises:
            HttpError: 404, there is no such response of the caller.
        """
        response_id, tenant = request.path_params["response_id"], caller_of(request).tenant
        response = await SQL.run(self._store.get, response_id, tenant)
        if response is None:
            raise _unknown()
        request.state.job_id = response.info.job_id
        # A lost job may have reappeared: clocks of gateways differ, and a server may be restored.
        return replace(response, end=None) if response.end == LOST else response

    async def _settled(self, response: StoredResponse) -> StoredResponse:
        """Return a response with its end, if it has ended by now."""
        if response.end is not None:
            return response
        settled = await settle(served(self._queues, response.queue).submitting, self._store, [response])
        end = settled[response.info.id]
        return replace(response, end=end) if isinstance(end, ResponseEnd) else response

    async def _current(self, response: StoredResponse) -> Response:
        if response.end is not None:
            return _answer(response, response.end.status, response.end)
        settled = await settle(served(self._queues, response.queue).submitting, self._store, [response])
        now = settled[response.info.id]
        if isinstance(now, ResponseEnd):
            return _answer(response, now.status, now)
        return _answer(response, "queued" if now is JobState.QUEUED else "in_progress")

    async def _cancel(self, response: StoredResponse) -> None:
        queue = served(self._queues, response.queue)
        [reached] = await queue.submitting.cancel_many([response.info.job_id], reason="cancelled by its client")
        if reached == "asked":
            try:
                await queue.following.result(response.info.job_id, timeout_s=CANCEL_WAIT_S)
            except (JobNotDone, JobNotFound, ResultExpired, ResultTimeout):
                return

    async def _whole(self, created: Created, request: Request) -> Response:
        response, queue = created.response, created.queue
        info = response.info

        def leave() -> None:
            if not info.is_stored:
                queue.readers.leave(info.job_id, is_shared=created.is_shared)

        try:
            result = await unless_left(request, queue.following.result(info.job_id), leave)
        except JobNotDone:
            if info.is_stored:
                await settle(queue.submitting, self._store, [response])
            raise
        if result is None:
            return Response(status_code=CLIENT_LEFT_STATUS)
        reason = result.choices[0].finish_reason if result.choices else None
        end = response_end(JobState.DONE, reason, output_of(result), result.usage, (None, None))
        if info.is_stored:
            await keep_end(self._store, info.id, end)
        return _answer(response, end.status, end)

    async def _stream(self, created: Created) -> AsyncIterator[bytes]:
        response = created.response
        stream = ResponseStream(response, created.queue, self._store)
        try:
            async for data in stream.events():
                yield data
        finally:
            if not stream.is_over and not response.info.is_stored:
                created.queue.readers.leave(response.info.job_id, is_shared=created.is_shared)


def _answer(response: StoredResponse, status: Status, end: ResponseEnd | None = None) -> JSONResponse:
    return JSONResponse(response_object(response.info, status, end))


def _unknown() -> HttpError:
    # The same for another tenant's response, so that it does not reveal which exist.
    return bad_request("there is no such response", code="response_not_found", param="response_id", status=404)


def _page(info: ResponseInfo, messages: Sequence[Item], request: PageRequest) -> tuple[Sequence[Object], bool]:
    """Return the items of a page, and whether there are more. Items are only deleted together.

    Raises:
        RequestRefused: the cursor is not the id of an item.
    """
    places = range(len(messages)) if request.order == "asc" else range(len(messages) - 1, -1, -1)
    begin = 0
    if request.after is not None:
        begin = places.index(_place_of(info, request.after, len(messages))) + 1
    end = begin + request.limit
    return [input_item(info, place, messages[place]) for place in places[begin:end]], end < len(places)


def _place_of(info: ResponseInfo, item_id: str, num_items: int) -> int:
    digits = item_id.removeprefix(f"{info.item_id}_")
    place = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < MAX_NUMBER_DIGITS else num_items
    if place >= num_items or item_id != item_id_of(info, place):
        raise unknown_cursor()
    return place
