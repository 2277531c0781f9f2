"""Build the OpenAPI document of the routes, and serve it."""

from collections.abc import Iterable, Mapping
from typing import cast

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from sluice.gateway.access import PUBLIC
from sluice.gateway.openapi.routes import Answer, ApiRoute, RouteDoc, json_answer
from sluice.gateway.openapi.schemas import Schema, object_schema, or_null
from sluice.version import installed_version

PATH = "/openapi.json"
TEXT: Schema = {"type": "string"}
ERROR = object_schema(
    "Error",
    error=object_schema(
        message=TEXT,
        type={"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
        param=or_null(TEXT),
        code={**or_null(TEXT), "description": "A constant word for programs."},
    ),
)
MEANINGS: Mapping[int, str] = {
    400: "The request is wrong.",
    401: "The API key is missing, unknown, revoked or expired.",
    403: "The API key lacks the scope.",
    404: "Not found, or it belongs to another tenant.",
    408: "The request took too long to arrive.",
    409: "It is not in the required state.",
    410: "It has expired.",
    413: "The body is too large, or stored files and responses take all the bytes that the tenant may have.",
    415: "The body's encoding is not supported.",
    422: "The idempotency key belongs to a different request.",
    429: "A limit or bound of the key or its tenant is reached, or the queue is full; see Retry-After.",
    431: "There are too many headers, or they are too large.",
    503: "Redis, or a database, does not answer, or the gateway is at its limit; try again.",
    504: "The job exceeded its time limit.",
}
OF_ALL = (400, 401, 429, 431, 503)
OF_BODIES = (408, 413, 415)
DOC = RouteDoc(
    tag="gateway",
    summary="Describe the gateway's routes",
    answers={200: json_answer("This document.", {"type": "object"})},
)


def document_route() -> ApiRoute:
    """Return the route that serves the document."""

    async def show(request: Request) -> Response:
        return JSONResponse(document(cast("Starlette", request.app).routes))

    return ApiRoute("GET", PATH, show, DOC, scope=None)


def document(routes: Iterable[BaseRoute]) -> Schema:
    """Return the OpenAPI document of those routes that are described."""
    components: dict[str, Schema] = {}
    paths: dict[str, Schema] = {}
    for route in routes:
        if isinstance(route, ApiRoute):
            paths.setdefault(route.path_format, {})[route.method.lower()] = _operation(route, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sluice", "version": installed_version(), "summary": "LLM generation behind a queue."},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute, components: dict[str, Schema]) -> Schema:
    doc = route.doc
    name = "_".join(part.strip("{}").replace(".", "_") for part in route.path_format.split("/") if part)
    needs = "" if route.scope is None else f"Needs the scope `{route.scope}`."
    made: Schema = {
        "operationId": f"{route.method.lower()}_{name}",
        "tags": [doc.tag],
        "summary": doc.summary,
        "responses": _responses(route, components),
    }
    if needs:
        made["description"] = needs
    if route.path in PUBLIC:
        made["security"] = []
    if doc.parameters:
        made["parameters"] = [
            {
                "name": one.name,
                "in": one.place,
                "description": one.description,
                "required": one.place == "path",
                "schema": one.schema,
            }
            for one in doc.parameters
        ]
    if doc.body:
        made["requestBody"] = {"required": not doc.is_body_optional, "content": _content(doc.body, components)}
    return made


def _responses(route: ApiRoute, components: dict[str, Schema]) -> Schema:
    doc = route.doc
    scoped = (403,) if route.scope else ()
    errors = {*doc.errors, *OF_ALL, *scoped, *(OF_BODIES if doc.body else ())}
    found = {status: _response(answer, components) for status, answer in doc.answers.items()}
    found |= {status: _response(json_answer(MEANINGS[status], ERROR), components) for status in errors}
    return {str(status): found[status] for status in sorted(found)}


def _response(answer: Answer, components: dict[str, Schema]) -> Schema:
    made: Schema = {"description": answer.description}
    if answer.content:
        made["content"] = _content(answer.content, components)
    if answer.events:
        made["x-events"] = {name: _hoisted(schema, components) for name, schema in answer.events.items()}
    return made


def _content(content: Mapping[str, Schema], components: dict[str, Schema]) -> Schema:
    return {media: {"schema": _hoisted(schema, components)} for media, schema in content.items()}


def _hoisted(part: object, components: dict[str, Schema]) -> object:
    """Return a schema with references in place of those that have a title, which become components."""
    if isinstance(part, list):
        return [_hoisted(one, components) for one in cast("list[object]", part)]
    if not isinstance(part, dict):
        return part
    schema = cast("Schema", part)
    title = schema.get("title")
    if not isinstance(title, str):
        return {name: _hoisted(value, components) for name, value in schema.items()}
    if title not in components:
        components[title] = {}  # a schema may contain itself
        components[title] = {name: _hoisted(value, components) for name, value in schema.items()}
    return {"$ref": f"#/components/schemas/{title}"}
