"""Routes for health checks, the OpenAPI document and the served models."""

from typing import cast

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway.files.hosts import StorageMarks, lacks_callbacks, without_callbacks
from sluice.gateway.keyring import Keyring
from sluice.gateway.openapi.document import document
from sluice.gateway.openapi.routes import json_answer, route
from sluice.gateway.openapi.schemas import NUMBER, TEXT, list_of, object_schema
from sluice.gateway.queues import Queues, unknown_model
from sluice.protocol.offers import Offer
from sluice.protocol.openai_format.bodies import Object

OK = {"const": "ok"}
HEALTH = object_schema("Health", status=OK)
READINESS = object_schema("Readiness", optional=("warnings",), status=OK, warnings=list_of(TEXT))
ENGINE = object_schema(
    "Engine",
    name=TEXT,
    exactness=TEXT,
    features=list_of(TEXT),
    formats=list_of(TEXT),
    refused=list_of(TEXT),
    families=list_of(TEXT),
    weights=list_of(TEXT),
)
MODEL = object_schema(
    "Model",
    optional=("parent",),
    id=TEXT,
    object={"const": "model"},
    created=NUMBER,
    owned_by=TEXT,
    parent=TEXT,
    engines=list_of(ENGINE),
)
MODELS = object_schema("Models", object={"const": "list"}, data=list_of(MODEL))


class StatusRoutes:
    """The routes."""

    def __init__(self, keyring: Keyring, queues: Queues, marks: StorageMarks) -> None:
        self._keyring, self._queues, self._marks = keyring, queues, marks

    @route("GET /openapi.json", json_answer("This document.", {"type": "object"}), tag="gateway", scope=None)
    async def show_document(self, request: Request) -> Response:
        """Describe the gateway's routes."""
        return JSONResponse(document(cast("Starlette", request.app).routes))

    @route("GET /livez", json_answer("The process runs.", HEALTH), tag="health", scope=None)
    async def live(self, _request: Request) -> Response:
        """Check that the process runs."""
        return JSONResponse({"status": "ok"})

    @route(
        "GET /readyz",
        json_answer("Requests can be served; `warnings` lists what does not work.", READINESS),
        tag="health",
        scope=None,
    )
    async def ready(self, _request: Request) -> Response:
        """Check that Redis answers, and that keys are known."""
        if self._keyring.is_required:
            self._keyring.check()
        await self._queues.check_ready()
        await self._marks.check()
        missing = [without_callbacks(queue.name) for queue in self._queues if await lacks_callbacks(queue)]
        return JSONResponse({"status": "ok", **({"warnings": missing} if missing else {})})

    @route("GET /v1/models", json_answer("All models.", MODELS), tag="openai", scope="read")
    async def list_models(self, _request: Request) -> Response:
        """List the models that workers serve."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in await self._queues.models()]})

    @route("GET /v1/models/{model:path}", json_answer("The model.", MODEL), tag="openai", scope="read")
    async def show_model(self, request: Request) -> Response:
        """Show a model that workers serve."""
        name, names = request.path_params["model"], await self._queues.models()
        if name not in names:
            raise unknown_model(name, names)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> Object:
        engines = [_engine(offer) for offer in self._queues.offers_of(name)]
        model = {"id": name, "object": "model", "created": 0, "owned_by": "sluice", "engines": engines}
        parent = self._queues.parent_of(name)
        return model if parent is None else {**model, "parent": parent}


def _engine(offer: Offer) -> Object:
    return {
        "name": offer.engine,
        "exactness": offer.exactness,
        "features": offer.features,
        "formats": offer.formats,
        "refused": offer.refused,
        "families": offer.families,
        "weights": offer.weights,
    }
