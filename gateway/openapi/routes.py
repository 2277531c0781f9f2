"""A route that carries its description, from which the OpenAPI document is built."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.routing import Route

from sluice.gateway.access import Handler, needs
from sluice.gateway.openapi.schemas import Schema, object_schema

JSON, EVENTS = "application/json", "text/event-stream"
_TEXT: Schema = {"type": "string"}
EVENT = object_schema("ServerSentEvent", optional=("event", "id"), event=_TEXT, id=_TEXT, data=_TEXT)
"""One event of a stream. `Answer.events` describes the JSON in its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter in the path, the query or a header."""

    name: str
    place: str
    """path, query or header."""

    description: str
    schema: Schema = field(default_factory=lambda: {"type": "string"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a status means, and the content that comes with it."""

    description: str
    content: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    """Media type to schema."""

    events: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    """Name of a server-sent event to the schema of its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDoc:
    """The description of one route."""

    tag: str
    """Group of routes."""

    summary: str
    answers: Mapping[int, Answer]
    errors: tuple[int, ...] = ()
    """Statuses of errors that this route can answer, besides those of every route."""

    parameters: tuple[Parameter, ...] = ()
    body: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    """Media type to schema; empty: it has none."""

    is_body_optional: bool = False


class ApiRoute(Route):
    """A route with its description.

    Args:
        method: The only method that it serves.
        path: Its path.
        handler: What answers.
        doc: The description.
        scope: What a key needs; None lets every caller in.
    """

    def __init__(self, method: str, path: str, handler: Handler, doc: RouteDoc, *, scope: str | None) -> None:
        super().__init__(path, handler if scope is None else needs(scope, handler), methods=[method])
        self.method, self.doc, self.scope = method, doc, scope


def json_answer(description: str, schema: Schema) -> Answer:
    """Describe an answer in JSON."""
    return Answer(description=description, content={JSON: schema})
