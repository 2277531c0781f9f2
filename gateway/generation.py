"""The routes that generate text: /v1/chat/completions and /v1/completions."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from dataclasses import replace
from datetime import timedelta

from starlette.requests import Request
from starlette.responses import Response

from sluice.gateway.access import caller_of
from sluice.gateway.connections.encoding import encoded_answer
from sluice.gateway.connections.events import EventStream
from sluice.gateway.errors import CLIENT_LEFT_STATUS, NO_NAMES, error_of, named
from sluice.gateway.openai.chunks import StreamChunks
from sluice.gateway.openai.encoded import EncodedChunks, server_sent
from sluice.gateway.openai.encoded_bodies import encoded_result
from sluice.gateway.openapi.messages import CALL_PIECE, TOOL_CALL, message_schema
from sluice.gateway.openapi.options import KEY, TOKEN_ID, options_schema
from sluice.gateway.openapi.routes import EVENT, EVENTS, JSON, Answer, route
from sluice.gateway.openapi.schemas import FLAG, NUMBER, TEXT, Schema, list_of, object_schema, or_null
from sluice.gateway.queues import QueueClients, Queues
from sluice.gateway.rates import KeyRates, callers_job
from sluice.gateway.readers import forget, unless_left
from sluice.gateway.requests import read_json, traceparent_of
from sluice.gateway.settings import GatewaySettings
from sluice.producer.errors import ProducerError
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.results import packed_result
from sluice.protocol.jobs import CheckedJob, Options
from sluice.protocol.openai_format.requests import (
    CHAT,
    CHAT_ROLES,
    COMPLETIONS,
    OF_TOOLS,
    SAME,
    Endpoint,
    ReadRequest,
    read_request,
)
from sluice.protocol.wire import JobId

DONE = b"data: [DONE]\n\n"
FIRST_EVENT_S = 1.0
"""The headers of a stream wait this long for its first event."""

# ---------------------------------------------------------------- schemas

FINISH: Schema = {"enum": ["stop", "length", "tool_calls", None]}
LOGPROBS: Schema = {"type": ["object", "null"]}

USAGE = object_schema(
    "CompletionUsage",
    prompt_tokens=NUMBER,
    completion_tokens=NUMBER,
    total_tokens=NUMBER,
    prompt_tokens_details=object_schema(cached_tokens=NUMBER),
)
CHAT_CHOICE = object_schema(
    "ChatChoice",
    index=NUMBER,
    message=object_schema(
        optional=("reasoning_content", "tool_calls"),
        role={"const": "assistant"},
        content=or_null(TEXT),
        refusal={"type": "null"},
        reasoning_content=TEXT,
        tool_calls=list_of(TOOL_CALL),
    ),
    logprobs=LOGPROBS,
    finish_reason=FINISH,
)
TEXT_CHOICE = object_schema("TextChoice", index=NUMBER, text=TEXT, logprobs=LOGPROBS, finish_reason=FINISH)
CHAT_PIECE = object_schema(
    "ChatPiece",
    index=NUMBER,
    delta=object_schema(
        optional=("role", "content", "reasoning_content", "tool_calls"),
        role=TEXT,
        content=or_null(TEXT),
        reasoning_content=TEXT,
        tool_calls=list_of(CALL_PIECE),
    ),
    logprobs=LOGPROBS,
    finish_reason=FINISH,
)
CHAT_MESSAGE = message_schema("ChatMessage", CHAT_ROLES)
TEXT_PROMPT: Schema = {"anyOf": [{**TEXT, "minLength": 1}, {**list_of(TOKEN_ID), "minItems": 1}]}


def _envelope(title: str, kind: str, choice: Schema, usage: Schema, *, has_usage: bool) -> Schema:
    return object_schema(
        title,
        optional=() if has_usage else ("usage",),
        id=TEXT,
        object={"const": kind},
        created=NUMBER,
        model=TEXT,
        choices=list_of(choice),
        usage=usage,
    )


def _answer_schema(whole: tuple[str, str, Schema], chunk: tuple[str, str, Schema]) -> Answer:
    return Answer(
        description="The output: whole, or with `stream` as events. The last is `[DONE]`, or an error.",
        content={JSON: _envelope(*whole, USAGE, has_usage=True), EVENTS: EVENT},
        events={"": _envelope(*chunk, or_null(USAGE), has_usage=False)},
    )


CHAT_ANSWER = _answer_schema(
    ("ChatCompletion", "chat.completion", CHAT_CHOICE), ("ChatChunk", "chat.completion.chunk", CHAT_PIECE)
)
TEXT_ANSWER = _answer_schema(
    ("Completion", "text_completion", TEXT_CHOICE), ("CompletionChunk", "text_completion", TEXT_CHOICE)
)


OPTIONS = options_schema(SAME | {"logit_bias", "logprobs", "structured"})
_SCHEMA: Schema = {"type": "object"}
_GRAMMAR: Schema = {**TEXT, "minLength": 1}
_CHOICE: Schema = {**list_of(_GRAMMAR), "minItems": 1}
_NAMED_SCHEMA = object_schema(
    None, optional=("name", "strict", "description"), name=TEXT, strict=FLAG, description=TEXT, schema=_SCHEMA
)
FORMAT: Schema = {
    "anyOf": [
        object_schema(None, type={"enum": ["text", "json_object"]}),
        object_schema("JsonSchemaFormat", type={"const": "json_schema"}, json_schema=_NAMED_SCHEMA),
    ]
}
CONSTRAINTS: Mapping[str, Schema] = {
    "response_format": FORMAT,
    "structured_outputs": object_schema(
        "StructuredOutputs",
        optional=("json", "json_object", "regex", "choice", "grammar"),
        json={"type": ["object", "string"]},
        json_object=FLAG,
        regex=_GRAMMAR,
        choice=_CHOICE,
        grammar=_GRAMMAR,
    ),
    "guided_json": {"type": ["object", "string"]},
    "guided_regex": _GRAMMAR,
    "guided_choice": _CHOICE,
    "guided_grammar": _GRAMMAR,
}
"""OpenAI's and vLLM's parameters for what the output must match."""


def _request(title: str, prompt: Mapping[str, Schema], own: Mapping[str, Schema]) -> Mapping[str, Schema]:
    """Return the schema of a request: the queue's options by OpenAI's names."""
    stream = {"stream": FLAG, "stream_options": object_schema(include_usage=FLAG, optional=("include_usage",))}
    optional = {**OPTIONS, **CONSTRAINTS, **own, **stream}
    return {JSON: object_schema(title, optional=tuple(optional), **prompt, **optional)}


CHAT_REQUEST = _request(
    "ChatRequest",
    {"messages": {**list_of(CHAT_MESSAGE), "minItems": 1}},
    {
        "max_completion_tokens": OPTIONS["max_tokens"],
        "logprobs": FLAG,
        "top_logprobs": OPTIONS["logprobs"],
        **options_schema(OF_TOOLS),
    },
)
TEXT_REQUEST = _request("CompletionRequest", {"prompt": TEXT_PROMPT}, {})

ERRORS = (404, 409, 422, 504)

# ---------------------------------------------------------------- routes


class GenerationRoutes:
    """The routes of generation requests. A job whose clients have left is cancelled."""

    def __init__(self, queues: Queues, rates: KeyRates, settings: GatewaySettings) -> None:
        self._queues, self._rates, self._settings = queues, rates, settings

    @route(
        f"POST {CHAT}", CHAT_ANSWER, tag="openai", scope="submit", errors=ERRORS, parameters=(KEY,), body=CHAT_REQUEST
    )
    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        return await self._answer(CHAT, request)

    @route(
        f"POST {COMPLETIONS}",
        TEXT_ANSWER,
        tag="openai",
        scope="submit",
        errors=ERRORS,
        parameters=(KEY,),
        body=TEXT_REQUEST,
    )
    async def complete(self, request: Request) -> Response:
        """Continue a text."""
        return await self._answer(COMPLETIONS, request)

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        """Submit the job of a request, and answer with its output.

        Raises:
            HttpError, RequestRefused, ProducerError: the request is refused, or its job ended badly.
        """
        body = await read_json(request, self._settings.max_body_bytes)
        parsed = read_request(endpoint, body)
        own = {"stream": parsed.is_stream, "awaited": not parsed.is_stream, "idempotency_key": KEY.read(request)}
        parsed = replace(parsed, options={**parsed.options, **own})
        queue = await self._queues.of_model(parsed.model)
        bounds = Options(
            deadline=timedelta(seconds=self._settings.request_limit_s), traceparent=traceparent_of(request)
        )
        with named(parsed.names):
            job = callers_job(caller_of(request), parsed.prompt, {**parsed.options, **bounds})
            return await self._generate(queue, parsed, job, request)

    async def _generate(self, queue: QueueClients, parsed: ReadRequest, job: CheckedJob, request: Request) -> Response:
        receipt, rates = await self._rates.submit(queue, caller_of(request), job)
        request.state.job_id = receipt.id
        if parsed.is_shared:
            await queue.readers.join(receipt.id, is_submitter=not receipt.is_duplicate)
        if parsed.is_stream:
            events = await begun(self._stream(queue, receipt.id, parsed), parsed.names)
            return EventStream(events, rates)
        answer = await _whole(queue, receipt.id, parsed, request)
        answer.headers.update(rates)
        return answer

    async def _stream(self, queue: QueueClients, job_id: JobId, parsed: ReadRequest) -> AsyncGenerator[bytes]:
        """Yield the events of a job as server-sent events.

        Raises:
            ProducerError: the job ended badly.
        """
        model = parsed.model or await self._queues.model_of(queue)
        chunks = EncodedChunks(StreamChunks(parsed.endpoint, job_id, model, parsed.has_usage))
        is_over = False
        try:
            async for events in queue.following.stream_groups(job_id, parsed.num_choices):
                if encoded := b"".join(map(chunks.of, events)):
                    yield encoded
            yield chunks.usage() + DONE
            is_over = True
        except ProducerError:
            is_over = True
            raise
        finally:
            if not is_over:
                queue.readers.leave(job_id, is_shared=parsed.is_shared)


async def begun(events: AsyncGenerator[bytes], names: Mapping[str, str] = NO_NAMES) -> AsyncIterator[bytes]:
    """Wait briefly for the first event, so that a job that is refused at once gets an error status; return the events.

    Args:
        events: The events.
        names: The API's names of parameters, as for `error_of`.

    Raises:
        ProducerError: the job has ended badly.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait((first,), timeout=FIRST_EVENT_S)
    except asyncio.CancelledError:
        await _end(first, events)
        raise
    if first.done():
        first.result()
    return _followed(first, events, names)


async def _end(first: asyncio.Future[bytes], events: AsyncGenerator[bytes]) -> None:
    """Close the events without waiting for the first one, so that the job counts as left now."""
    first.cancel()
    first.add_done_callback(forget)
    await asyncio.wait((first,), timeout=FIRST_EVENT_S)
    if first.done():  # not done: redis-py dropped the cancellation, and the events continue
        await events.aclose()


async def _followed(
    first: Awaitable[bytes], others: AsyncIterator[bytes], names: Mapping[str, str]
) -> AsyncIterator[bytes]:
    """Yield all events; the last one of a job that ends badly is an error, not `[DONE]`."""
    try:
        yield await first
        async for event in others:
            yield event
    except ProducerError as error:
        yield server_sent(error_of(error, names).body)


async def _whole(queue: QueueClients, job_id: JobId, parsed: ReadRequest, request: Request) -> Response:
    def leave() -> None:
        queue.readers.leave(job_id, is_shared=parsed.is_shared)

    answer = await unless_left(request, _answer(queue, job_id, parsed), leave)
    return Response(status_code=CLIENT_LEFT_STATUS) if answer is None else answer


async def _answer(queue: QueueClients, job_id: JobId, parsed: ReadRequest) -> Response:
    client = queue.following
    packed = await client.run(packed_result(Queue(queue.name), job_id, waits=client.waits))

    def encode() -> bytes:
        result = packed.unpack()
        return encoded_result(parsed.endpoint, job_id, result, result.model or parsed.model or "")

    return await encoded_answer(packed.num_bytes, encode)
