"""The ASGI application: its routes."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from sluice.gateway.access import Access
from sluice.gateway.arrival.requests import RequestBounds
from sluice.gateway.arrival.shares import ShareLimits, Shares
from sluice.gateway.audit import AuditLog
from sluice.gateway.batches.routes import BatchRoutes
from sluice.gateway.batches.store import BatchStore
from sluice.gateway.connections.drain import Drain, Draining
from sluice.gateway.embeddings import EmbeddingRoutes
from sluice.gateway.errors import CLIENT_LEFT_STATUS, METHOD_NOT_ALLOWED, SERVER, HttpError, error_of
from sluice.gateway.files.hosts import StorageMarks
from sluice.gateway.files.routes import FileRoutes
from sluice.gateway.files.storage import Storage
from sluice.gateway.files.store import FileStore
from sluice.gateway.generation import GenerationRoutes
from sluice.gateway.keyring import Keyring
from sluice.gateway.log.requests import REQUEST_ID, RequestLog
from sluice.gateway.native.events import EventRoute
from sluice.gateway.native.jobs import JobRoutes
from sluice.gateway.native.queues import QueueRoutes
from sluice.gateway.native.records import Records
from sluice.gateway.native.scale import ScaleRoutes
from sluice.gateway.native.schedules import ScheduleRoutes
from sluice.gateway.native.submit import SubmitRoute
from sluice.gateway.openapi.routes import ApiRoute, routes_of
from sluice.gateway.queues import Queues
from sluice.gateway.rates import RATE_HEADERS, KeyRates
from sluice.gateway.refusals import count
from sluice.gateway.reranking import RerankRoutes
from sluice.gateway.responses.routes import ResponseRoutes
from sluice.gateway.responses.store import ResponseStore
from sluice.gateway.schedules import ScheduleChanges
from sluice.gateway.settings import GatewaySettings, is_loopback
from sluice.gateway.status import StatusRoutes
from sluice.gateway.tables.database import Database
from sluice.gateway.tables.quota import Quota
from sluice.gateway.threads import SQL, SQL_LIMIT_S
from sluice.gateway.ui.app import SharedParts, page_routes
from sluice.producer.errors import HistoryUnavailable, ProducerError, QueueFull
from sluice.protocol.bounds import TENANT_SHARE
from sluice.protocol.openai_format.requests import RequestRefused

ANSWERED = (HTTPException, HttpError, RequestRefused, ProducerError)
"""Errors that clients read."""

MIB = 1024 * 1024
LOG = logging.getLogger(__name__)


def create_app(settings: GatewaySettings, keyring: Keyring, drain: Drain) -> ASGIApp:
    """Build the application. It connects to Redis when it starts.

    Raises:
        InvalidSetting: the Redis URL or the name of a queue is wrong.
    """
    # The log is the outermost middleware, so that responses to refused and failed requests have an id, too.
    return RequestLog(Draining(create_router(settings, keyring), drain))


def create_router(settings: GatewaySettings, keyring: Keyring) -> Starlette:
    """Build the routes, with all middleware but the log.

    Raises:
        InvalidSetting: as `create_app`.
    """
    queues, storage = Queues(settings), Storage(settings.files_url or "file:///nowhere")
    database = Database(settings.database_url, patience_s=SQL_LIMIT_S)
    marks = StorageMarks(queues, storage)
    rates, records = KeyRates(queues.first.submitting, queues.first.name), Records(settings.database_url)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        keyring.start()
        await _warn_without(database)
        async with queues:
            marks.start()
            yield
            await marks.stop()
        database.close()
        await asyncio.to_thread(keyring.close)
        await asyncio.to_thread(records.close)

    schedules = ScheduleChanges(AuditLog(database), rates, settings)
    shared = SharedParts(keyring, queues, rates, records, database, storage, schedules)
    return Starlette(
        routes=[*_api_routes(shared, settings, marks), *page_routes(shared)],
        middleware=[
            Middleware(RequestBounds, shares=Shares(_share_limits(settings))),
            *_cors(settings),
            Middleware(Access, keyring=keyring, is_loopback=is_loopback(settings.host)),
        ],
        exception_handlers={
            **dict.fromkeys(ANSWERED, _answer_with),
            ClientDisconnect: _answer_nobody,
            Exception: _answer_broken,
        },
        lifespan=lifespan,
    )


def _api_routes(shared: SharedParts, settings: GatewaySettings, marks: StorageMarks) -> Iterator[ApiRoute]:
    queues, rates, database = shared.queues, shared.rates, shared.database
    audit = AuditLog(database)
    quota, files = Quota(database, settings.tenant_files_mib * MIB), FileStore(database)
    return routes_of(
        StatusRoutes(shared.keyring, queues, marks),
        GenerationRoutes(queues, rates, settings),
        EmbeddingRoutes(queues, rates, settings),
        RerankRoutes(queues, rates, settings),
        ResponseRoutes(queues, rates, settings, ResponseStore(database), quota),
        FileRoutes(files, shared.storage, settings.max_file_mib * MIB, quota),
        BatchRoutes(BatchStore(database), files, shared.storage, queues, quota, max_open=settings.tenant_batches),
        SubmitRoute(queues, rates, settings),
        JobRoutes(queues, shared.records),
        EventRoute(queues),
        QueueRoutes(queues, audit, settings),
        ScaleRoutes(queues),
        ScheduleRoutes(queues, shared.schedules, settings),
    )


def _share_limits(settings: GatewaySettings) -> ShareLimits:
    return ShareLimits(
        held_bytes=settings.max_held_bytes,
        tenant_held_bytes=settings.tenant_held_mib * MIB,
        tenant_unread_bytes=settings.tenant_unread_mib * MIB,
        tenant_requests=settings.tenant_requests,
        key_reads=settings.key_reads,
    )


def _cors(settings: GatewaySettings) -> Iterator[Middleware]:
    """Yield the CORS middleware if the settings allow other origins. Their requests need a key as well."""
    if settings.cors_origins:
        yield Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("retry-after", REQUEST_ID, *RATE_HEADERS),
        )


async def _warn_without(database: Database) -> None:
    try:
        await SQL.run(database.check)
    except HistoryUnavailable as error:
        LOG.warning("Responses, files and batches cannot be kept: %s", error)


async def _answer_with(request: Request, error: Exception) -> Response:
    if isinstance(error, QueueFull) and error.reason == TENANT_SHARE.code:
        count(TENANT_SHARE)
    if not isinstance(error, HttpError):
        error = error_of(cast("ProducerError | RequestRefused | HTTPException", error))
    if error.status == METHOD_NOT_ALLOWED:
        error.headers["allow"] = ", ".join(_methods(request))
    return error.response


def _methods(request: Request) -> Sequence[str]:
    """Return the methods that a path allows: a route of the API has one, and HEAD with GET."""
    routes = (route for route in cast("Starlette", request.app).routes if isinstance(route, Route))
    methods = (route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted(chain.from_iterable(methods))


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT_STATUS)  # its client left before the end of the body


async def _answer_broken(_request: Request, _error: Exception) -> Response:
    # Starlette also raises the error to the server, which logs it.
    return HttpError(500, SERVER, "the gateway failed; its log has the cause", "internal_error").response
