"""The ASGI application: routes, and the clients of the queue that they share."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.producer.aio import AsyncProducer
from sluice.producer.contract.openai.requests import ENDPOINTS, Endpoint, RequestRefused
from sluice.producer.errors import ProducerError
from sluice.producer.gateway.access import Access, Handler, needs
from sluice.producer.gateway.errors import HttpError, error_of
from sluice.producer.gateway.generation import GenerationRoutes
from sluice.producer.gateway.keyring import Keyring
from sluice.producer.gateway.models import Models
from sluice.producer.gateway.rates import RATE_HEADERS
from sluice.producer.gateway.settings import GatewaySettings, is_loopback

SUBMIT_PATIENCE_S = 1.0
"""A request is answered with 503 when Redis does not answer for this long."""

FOLLOW_PATIENCE_S = 60.0
"""Streams of accepted jobs wait this long for Redis to return."""


def create_app(settings: GatewaySettings, keyring: Keyring) -> Starlette:
    """Build the application. It connects when it starts.

    Raises:
        InvalidSetting: the Redis URL is wrong.
    """
    submitting = _client(settings, SUBMIT_PATIENCE_S)
    following = _client(settings, FOLLOW_PATIENCE_S)
    models = Models(submitting)
    generation = GenerationRoutes(submitting, following, models, settings)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        keyring.start()
        async with submitting, following:
            yield
            await generation.close()
        await asyncio.to_thread(keyring.close)

    async def list_models(_request: Request) -> Response:
        names = await models.names()
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "sluice"} for name in names]
        return JSONResponse({"object": "list", "data": data})

    async def live(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_request: Request) -> Response:
        if keyring.is_required:
            keyring.check()
        await submitting.queue()
        return JSONResponse({"status": "ok"})

    routes = [
        Route("/livez", live),
        Route("/readyz", ready),
        Route("/v1/models", needs("read", list_models)),
        *(Route(path, needs("submit", _generate(generation, path)), methods=["POST"]) for path in ENDPOINTS),
    ]
    return Starlette(
        routes=routes,
        middleware=[*_cors(settings), Middleware(Access, keyring=keyring, is_loopback=is_loopback(settings.host))],
        exception_handlers=dict.fromkeys((HTTPException, HttpError, RequestRefused, ProducerError), _answer_with),
        lifespan=lifespan,
    )


def _cors(settings: GatewaySettings) -> Iterator[Middleware]:
    """Yield the middleware that lets pages of other sites read answers, if it is asked for. They need a key as well."""
    if settings.cors_origins:
        yield Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("retry-after", *RATE_HEADERS),
        )


def _client(settings: GatewaySettings, patience_s: float) -> AsyncProducer:
    return AsyncProducer(
        settings.redis_url, queue=settings.queue, partitions=settings.partitions, patience_s=patience_s
    )


def _generate(generation: GenerationRoutes, endpoint: Endpoint) -> Handler:
    async def answer(request: Request) -> Response:
        return await generation.answer(endpoint, request)

    return answer


async def _answer_with(_request: Request, error: Exception) -> Response:
    if not isinstance(error, HttpError):
        error = error_of(cast("ProducerError | RequestRefused | HTTPException", error))
    return error.response
