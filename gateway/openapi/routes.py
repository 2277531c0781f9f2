"""Routes that describe themselves where they are handled: by that, requests are read and the document is built.

A handler is a method with `@route`. What it reads of the query is declared once, with its bounds and its error.
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

JSON, EVENTS = "application/json", "text/event-stream"
EVENT = object_schema("ServerSentEvent", optional=("event", "id"), event=TEXT, id=TEXT, data=TEXT)
"""One event of a stream. `Answer.events` describes the JSON in its data."""

MAX_SECONDS = 10**9
DECIMAL = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
"""A number as JSON has it."""

MAX_DIGITS = 18
MAX_SHOWN_CHARS = 64
MARK = "description_of_route"
Value = TypeVar("Value")
Default = TypeVar("Default")
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., object])

# ---------------------------------------------------------------- parameters


@dataclass(frozen=True, slots=True)
class Parameter(Generic[Value]):
    """A parameter in the query or a header, which reads itself."""

    name: str
    description: str
    schema: Schema
    parse: Callable[[str], Value]
    """Raises ValueError or KeyError for a text that is not what it must be."""

    wanted: str
    """What it must be, for its error."""

    default: Value
    place: str = "query"
    """query or header."""

    def read(self, request: Request) -> Value:
        """Return its value in a request.

        Raises:
            HttpError: 400, it is not what it must be.
        """
        given = (request.headers if self.place == "header" else request.query_params).get(self.name)
        if given is None:
            return self.default
        try:
            return self.parse(given)
        except (ValueError, KeyError) as error:
            message = f"{self.name} must be {self.wanted}, got {given[:MAX_SHOWN_CHARS]!r}"
            raise bad_request(message, param=self.name) from error


def text(name: str, description: str, *, place: str = "query") -> Parameter[str | None]:
    """Declare a text. Databases refuse NUL, which none of their names has."""

    def parse(given: str) -> str | None:
        return given.replace("\0", "?")

    return Parameter(name, description, TEXT, parse, "text", None, place)


def whole_number(
    name: str, description: str, *, default: int, least: int = 0, most: int | None = None
) -> Parameter[int]:
    """Declare a whole number; a default below the least one stands for none."""

    def parse(given: str) -> int:
        value = int(given) if given.isascii() and given.isdecimal() and len(given) <= MAX_DIGITS else least - 1
        if value < least or (most is not None and value > most):
            raise ValueError
        return value

    bounds = {"minimum": least, "maximum": most, "default": None if default < least else default}
    schema: Schema = {**NUMBER, **{name: value for name, value in bounds.items() if value is not None}}
    wanted = "a whole number" if most is None else f"a whole number in [{least}, {most}]"
    return Parameter(name, description, schema, parse, wanted, default)


def seconds(
    name: str, description: str, *, default: Default, is_positive: bool = False
) -> "Parameter[float | Default]":
    """Declare a number of seconds."""

    def parse(given: str) -> float | Default:
        value = float(given) if DECIMAL.fullmatch(given) else -1.0
        if not 0 <= value <= MAX_SECONDS or (is_positive and not value):
            raise ValueError
        return value

    least = "exclusiveMinimum" if is_positive else "minimum"
    schema: Schema = {"type": "number", least: 0, "maximum": MAX_SECONDS}
    wanted = f"a number of seconds in {'(' if is_positive else '['}0, {MAX_SECONDS}]"
    return Parameter(name, description, schema, parse, wanted, default)


def choice(name: str, description: str, values: Sequence[Value], *, default: Value) -> Parameter[Value]:
    """Declare a choice between texts; None stands for no choice."""
    by_name = {str(value): value for value in values}
    schema: Schema = {"enum": list(by_name), **({} if default is None else {"default": str(default)})}
    wanted = " or ".join(by_name) if len(by_name) == 2 else f"one of {', '.join(by_name)}"
    return Parameter(name, description, schema, by_name.__getitem__, wanted, default)


def flag(name: str, description: str) -> Parameter[bool]:
    """Declare what is true, or false as by default."""
    values = {"true": True, "false": False}
    return Parameter(name, description, FLAG, values.__getitem__, "true or false", default=False)


# ---------------------------------------------------------------- routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a status means, and the content that comes with it."""

    description: str
    content: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    """Media type to schema."""

    events: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    """Name of a server-sent event to the schema of its data."""


def json_answer(description: str, schema: Schema) -> Answer:
    """Describe an answer in JSON."""
    return Answer(description=description, content={JSON: schema})


@dataclass(frozen=True, slots=True)
class RouteDescription:
    """What a route serves: a decorator of the method that handles it, whose docstring is the summary."""

    method_and_path: str
    answers: Answer | Mapping[int, Answer]
    """By status; one alone has the status 200."""

    _: KW_ONLY
    tag: str
    """Group of routes."""

    scope: str | None
    """What a key needs; None lets every caller in."""

    errors: Sequence[int] = ()
    """Statuses of errors that it can answer with, besides those that follow from its form."""

    parameters: Sequence[Parameter[Any]] = ()  # Any: each reads its own kind
    body: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    """Media type to schema; empty: it has none."""

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
    """Yield the routes whose methods these objects have."""
    for one in handlers:
        for name, method in vars(type(one)).items():
            if (description := getattr(method, MARK, None)) is not None:
                yield ApiRoute(description, getattr(one, name))
