"""Build the OpenAPI document of the routes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from starlette.convertors import PathConvertor
from starlette.routing import BaseRoute

from sluice.gateway.access import PUBLIC
from sluice.gateway.openapi.routes import Answer, ApiRoute, Parameter, json_answer
from sluice.gateway.openapi.schemas import TEXT, Schema, object_schema, or_null
from sluice.version import installed_version

ERROR = object_schema(
    "Error",
    error=object_schema(
        message=TEXT,
        type={"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
        param=or_null(TEXT),
        code={**or_null(TEXT), "description": "Error code, for programs."},
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


def document(routes: Iterable[BaseRoute]) -> Schema:
    """Return the OpenAPI document of the described routes."""
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
    described = route.description
    name = "_".join(part.strip("{}").replace(".", "_") for part in route.path_format.split("/") if part)
    parameters = [*_in_path(route), *map(_parameter, described.parameters)]
    optional = {
        "description": f"Needs the scope `{described.scope}`." if described.scope else None,
        "security": [] if route.path in PUBLIC else None,
        "parameters": parameters or None,
        "requestBody": {"required": True, "content": _content(described.body, components)} if described.body else None,
    }
    return {
        "operationId": f"{route.method.lower()}_{name}",
        "tags": [described.tag],
        "summary": route.summary,
        "responses": _responses(route, components),
        **{name: value for name, value in optional.items() if value is not None},
    }


def _in_path(route: ApiRoute) -> Iterator[Schema]:
    """Describe the parameters of a path: ids, and names."""
    for name, convertor in route.param_convertors.items():
        meaning = f"Id of a {name.removesuffix('_id')}" if name.endswith("_id") else f"Name of a {name}"
        description = f"{meaning}; it may have slashes." if isinstance(convertor, PathConvertor) else f"{meaning}."
        yield {"name": name, "in": "path", "description": description, "required": True, "schema": TEXT}


def _parameter(parameter: Parameter[Any]) -> Schema:  # Any: of any kind
    described = {"description": parameter.description, "required": False, "schema": parameter.schema}
    return {"name": parameter.name, "in": parameter.place, **described}


def _responses(route: ApiRoute, components: dict[str, Schema]) -> Schema:
    described = route.description
    errors = {*described.errors, *OF_ALL, *(OF_BODIES if described.body else ())}
    errors |= {403} if described.scope else set()
    errors |= {404} if route.param_convertors else set()
    answers = {200: described.answers} if isinstance(described.answers, Answer) else described.answers
    responses = {status: _response(answer, components) for status, answer in answers.items()}
    responses |= {status: _response(json_answer(MEANINGS[status], ERROR), components) for status in errors}
    return {str(status): responses[status] for status in sorted(responses)}


def _response(answer: Answer, components: dict[str, Schema]) -> Schema:
    response: Schema = {"description": answer.description}
    if answer.content:
        response["content"] = _content(answer.content, components)
    if answer.events:
        response["x-events"] = {name: _hoisted(schema, components) for name, schema in answer.events.items()}
    return response


def _content(content: Mapping[str, Schema], components: dict[str, Schema]) -> Schema:
    return {media: {"schema": _hoisted(schema, components)} for media, schema in content.items()}


def _hoisted(part: object, components: dict[str, Schema]) -> object:
    """Return a schema in which each schema with a title is replaced by a reference to a new component."""
    if isinstance(part, list):
        return [_hoisted(item, components) for item in cast("list[object]", part)]
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
