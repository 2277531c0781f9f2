"""Routes that are described where they are handled: requests are read, and the OpenAPI document built, from that.

A handler is a method with `@route`. Each query parameter is declared once, with its bounds and its error.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.routing import Route

from sluice.gateway.access import Handler, needs
from sluice.gateway.errors import bad_request
from sluice.gateway.openapi.schemas import FLAG, NUMBER, TEXT, Schema, object_schema
from sluice.protocol.checks import whole

JSON, EVENTS = "application/json", "text/event-stream"
EVENT = object_schema("ServerSentEvent", optional=("event", "id"), event=TEXT, id=TEXT, data=TEXT)
"""One event of a stream. `Answer.events` describes the JSON in its data."""

MAX_SECONDS = 10**9
DECIMAL = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
"""A JSON number that is not negative."""

MAX_SHOWN_CHARS = 64
MARK = "description_of_route"
Value = TypeVar("Value")
Default = TypeVar("Default")
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., object])

# ---------------------------------------------------------------- parameters


@dataclass(frozen=True, slots=True)
class Parameter(Generic[Value]):
    """A parameter in the query or a header, with its parser."""

    name: str
    description: str
    schema: Schema
    parse: Callable[[str], Value]
    """Parser of the text; raises ValueError or KeyError if it is not valid."""

    expected: str
    """Description of valid values, for the error."""

    default: Value
    place: str = "query"
    """Where the parameter is: query or header."""

    def read(self, request: Request) -> Value:
        """Return the parameter's value in a request.

        Raises:
            HttpError: 400, the value is not valid.
        """
        value = (request.headers if self.place == "header" else request.query_params).get(self.name)
        if value is None:
            return self.default
        try:
            return self.parse(value)
        except (ValueError, KeyError) as error:
            message = f"{self.name} must be {self.expected}, got {value[:MAX_SHOWN_CHARS]!r}"
            raise bad_request(message, param=self.name) from error


def text(name: str, description: str, *, place: str = "query") -> Parameter[str | None]:
    """Declare a text. NUL, which databases refuse and no name has, is replaced."""

    def parse(value: str) -> str | None:
        return value.replace("\0", "?")

    return Parameter(name, description, TEXT, parse, "text", None, place)


def whole_number(
    name: str, description: str, *, default: int, least: int = 0, most: int | None = None
) -> Parameter[int]:
    """Declare a whole number; a default below `least` means that there is none."""

    def parse(digits: str) -> int:
        value = whole(digits)
        if value is None or value < least or (most is not None and value > most):
            raise ValueError
        return value

    bounds = {"minimum": least, "maximum": most, "default": None if default < least else default}
    schema: Schema = {**NUMBER, **{name: value for name, value in bounds.items() if value is not None}}
    expected = "a whole number" if most is None else f"a whole number in [{least}, {most}]"
    return Parameter(name, description, schema, parse, expected, default)


def seconds(
    name: str, description: str, *, default: Default, is_positive: bool = False
) -> "Parameter[float | Default]":
    """Declare a number of seconds."""

    def parse(number: str) -> float | Default:
        value = float(number) if DECIMAL.fullmatch(number) else -1.0
        if not 0 <= value <= MAX_SECONDS or (is_positive and not value):
            raise ValueError
        return value

    least = "exclusiveMinimum" if is_positive else "minimum"
    schema: Schema = {"type": "number", least: 0, "maximum": MAX_SECONDS}
    expected = f"a number of seconds in {'(' if is_positive else '['}0, {MAX_SECONDS}]"
    return Parameter(name, description, schema, parse, expected, default)


def choice(name: str, description: str, values: Sequence[Value], *, default: Value) -> Parameter[Value]:
    """Declare a choice between texts; the default None means that there is none."""
    by_name = {str(value): value for value in values}
    schema: Schema = {"enum": list(by_name), **({} if default is None else {"default": str(default)})}
    expected = " or ".join(by_name) if len(by_name) == 2 else f"one of {', '.join(by_name)}"
    return Parameter(name, description, schema, by_name.__getitem__, expected, default)


def flag(name: str, description: str) -> Parameter[bool]:
    """Declare a flag: true, or false, the default."""
    values = {"true": True, "false": False}
    return Parameter(name, description, FLAG, values.__getitem__, "true or false", default=False)


# ---------------------------------------------------------------- routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response: the meaning of its status, and its content."""

    description: str
    content: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    """Media type to schema."""

    events: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    """Name of a server-sent event to the schema of its data."""


def json_answer(description: str, schema: Schema) -> Answer:
    """Describe a JSON response."""
    return Answer(description=description, content={JSON: schema})


@dataclass(frozen=True, slots=True)
class RouteDescription:
    """The description of a route, as a decorator of the method that handles it, whose docstring is the summary."""

    method_and_path: str
    answers: Answer | Mapping[int, Answer]
    """Responses by status; a single one has the status 200."""

    _: KW_ONLY
    tag: str
    """The group of routes in the document."""

    scope: str | None
    """Scope that the API key needs; None: any caller is allowed."""

    errors: Sequence[int] = ()
    """Statuses of possible errors, besides those that follow from the rest of the description."""

    parameters: Sequence[Parameter[Any]] = ()  # Any: each reads its own kind
    body: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    """Media type to schema; empty: the request has no body."""

    def __call__(self, handler: AnyHandler) -> AnyHandler:
        """Describe a handler."""
        setattr(handler, MARK, self)
        return handler


route = RouteDescription


class ApiRoute(Route):
    """A route with its description."""

    def __init__(self, description: RouteDescription, handler: Handler) -> None:
        self.description, scope = description, description.scope
        self.summary = (handler.__doc__ or "").partition("\n")[0].removesuffix(".")
        self.method, _, path = description.method_and_path.partition(" ")
        super().__init__(path, handler if scope is None else needs(scope, handler), methods=[self.method])


def routes_of(*handlers: object) -> Iterator[ApiRoute]:
    """Yield the routes of the decorated methods of these objects."""
    for handler in handlers:
        for name, method in vars(type(handler)).items():
            if (description := getattr(method, MARK, None)) is not None:
                yield ApiRoute(description, getattr(handler, name))
