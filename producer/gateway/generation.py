"""The routes that generate text: /v1/chat/completions and /v1/completions."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sluice.producer.aio import AsyncProducer
from sluice.producer.contract.jobs import Options
from sluice.producer.contract.openai.requests import CHAT, Endpoint
from sluice.producer.contract.wire import JobId
from sluice.producer.errors import LessDurable, ProducerError
from sluice.producer.gateway.access import Caller, caller_of
from sluice.producer.gateway.errors import error_of
from sluice.producer.gateway.models import Models
from sluice.producer.gateway.rates import Rates
from sluice.producer.gateway.readers import Readers
from sluice.producer.gateway.requests import Generation, read_generation, read_json
from sluice.producer.gateway.settings import GatewaySettings
from sluice.producer.openai.bodies import Object, chat_body, completion_body
from sluice.producer.openai.chunks import Chunks
from sluice.producer.operations.submission import Receipt

DONE = b"data: [DONE]\n\n"


class GenerationRoutes:
    """The routes of generation requests. A job whose clients have left is cancelled.

    Args:
        submitting: A client that gives up soon while Redis is away.
        following: A client that waits for Redis to return, for the jobs that the queue has.
    """

    def __init__(
        self, submitting: AsyncProducer, following: AsyncProducer, models: Models, settings: GatewaySettings
    ) -> None:
        self._submitting, self._following = submitting, following
        self._models, self._settings = models, settings
        self._rates = Rates(submitting, settings.queue)
        self._readers = Readers(submitting, settings)

    async def answer(self, endpoint: Endpoint, request: Request) -> Response:
        """Submit the job of a request, and answer with its output.

        Raises:
            HttpError, RequestRefused, ProducerError: the request is refused, or its job ended badly.
        """
        body = await read_json(request, self._settings.max_body_bytes)
        asked = read_generation(endpoint, body, request.headers.get("idempotency-key"))
        await self._models.check(asked.model)
        receipt, rates = await self._submit(caller_of(request), asked)
        if asked.is_shared:
            await self._readers.join(receipt.id, is_submitter=not receipt.is_duplicate)
        if asked.is_stream:
            return StreamingResponse(self._stream(receipt.id, asked), headers=rates, media_type="text/event-stream")
        answer = await self._whole(receipt.id, asked, request)
        answer.headers.update(rates)
        return answer

    async def close(self) -> None:
        """Finish the cancellations that were begun."""
        await self._readers.close()

    async def _submit(self, caller: Caller, asked: Generation) -> tuple[Receipt, Mapping[str, str]]:
        """Submit a job, and return with it what its key has left. A request that adds no job costs nothing."""
        rates = await self._rates.charge(caller.key, asked)
        own = Options(tenant=caller.tenant, deadline=timedelta(seconds=self._settings.request_limit_s))
        try:
            receipt = await self._submitting.submit(asked.prompt, **{**asked.options, **own})
        except LessDurable:
            raise  # the queue has the job
        except ProducerError:
            await self._rates.give_back(caller.key, asked)
            raise
        if receipt.is_duplicate:
            rates = await self._rates.give_back(caller.key, asked) or rates
        return receipt, rates

    # ------------------------------------------------------------ whole answers

    async def _whole(self, job_id: JobId, asked: Generation, request: Request) -> Response:
        waiting = asyncio.ensure_future(self._following.result(job_id))
        leaving = asyncio.ensure_future(_client_left(request))
        try:
            await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not waiting.done():
                waiting.cancel()
                self._readers.leave(job_id, is_shared=asked.is_shared)
        if not waiting.done() or waiting.cancelled():
            return Response(status_code=499)  # nobody reads it
        result = waiting.result()
        body = chat_body if asked.endpoint == CHAT else completion_body
        return JSONResponse(body(job_id, result, result.model or asked.model or ""))

    # ------------------------------------------------------------ streams

    async def _stream(self, job_id: JobId, asked: Generation) -> AsyncIterator[bytes]:
        """Yield the events of a job as server-sent events. A job that ends badly ends with an error, not `[DONE]`."""
        model = asked.model or next(iter(await self._models.names()), "")
        chunks = Chunks(asked.endpoint, job_id, model, asked.has_usage)
        is_over = False
        try:
            async for event in self._following.stream_choices(job_id, asked.num_choices):
                for chunk in chunks.of(event):
                    yield _event(chunk)
            for chunk in chunks.usage():
                yield _event(chunk)
            yield DONE
            is_over = True
        except ProducerError as error:
            is_over = True
            yield _event(error_of(error).body)
        finally:
            if not is_over:
                self._readers.leave(job_id, is_shared=asked.is_shared)


async def _client_left(request: Request) -> None:
    # Its body has been read: the next message is that it left.
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(value: Object) -> bytes:
    """Encode one event. ASCII, because httpx takes U+2028 for the end of a line."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
