"""The tools of a job: functions that its model may call. Knows no engine and no chat template.

A caller gives them as OpenAI's APIs do, and each is stored as JSON text. What a model calls is a `ToolCall`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sluice.protocol import limits
from sluice.protocol.checks import Check, is_listing, is_text, raise_first
from sluice.protocol.errors import InvalidJob

AUTO, NONE, REQUIRED = "auto", "none", "required"
CHOICES = (AUTO, NONE, REQUIRED)
OF_FUNCTION = "function:"
"""Before the name of a function, as the stored value of `tool_choice`."""

NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{limits.MAX_TOOL_NAME_CHARS}}}")
_NAME_RULE = f"1 to {limits.MAX_TOOL_NAME_CHARS} letters, digits and any of _ - ."
_KEYS = frozenset({"name", "description", "parameters", "strict"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    """The JSON schema of its arguments; None: it has none."""

    is_strict: bool = True
    """Whether arguments must match the schema. Otherwise they are any JSON object."""

    @classmethod
    def read(cls, text: str) -> "Function":
        """Read a function as it is stored."""
        values: dict[str, Any] = json.loads(text)  # Any: checked when it was stored
        is_strict = values.pop("strict", True)
        return cls(is_strict=is_strict, **values)

    @property
    def shown(self) -> Mapping[str, object]:
        """The function as chat templates take it."""
        parts = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: part for name, part in parts.items() if part is not None}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a function in a message of the assistant.

    Raises:
        InvalidJob: a part is not text, or the arguments are not a JSON object.
    """

    id: str
    name: str
    arguments: str
    """A JSON object, as text."""

    def __post_init__(self) -> None:
        is_named = all(is_text(part) and part for part in (self.id, self.name))
        raise_first([(is_named, "a tool call must have an id, and the name of its function, in UTF-8")])
        try:
            is_object = isinstance(json.loads(self.arguments), dict)
        except (ValueError, TypeError, RecursionError):
            is_object = False
        raise_first([(is_object, f"the arguments of a tool call must be a JSON object as text, got {self._shown}")])

    @property
    def _shown(self) -> str:
        return f"{self.arguments!r:.100}"

    @property
    def values(self) -> Mapping[str, object]:
        """The arguments."""
        return cast("Mapping[str, object]", json.loads(self.arguments))


def functions_of(tools: Sequence[str]) -> list[Function]:
    """Return the functions of a job from their stored form."""
    return list(map(Function.read, tools))


def stored_tools(value: object) -> tuple[str, ...]:
    """Return a caller's value of the option `tools` as it is stored.

    Raises:
        InvalidJob: it is not a list of functions.
    """
    if value is None:
        return ()
    if not is_listing(value, lambda item: isinstance(item, Mapping)):
        raise InvalidJob(f"tools must be a list of functions, got {value!r:.100}")
    return tuple(map(_stored_tool, cast("Sequence[Mapping[str, object]]", value)))


def _stored_tool(tool: Mapping[str, object]) -> str:
    """Return one tool, in the form of OpenAI's chats or of its responses, as it is stored."""
    if tool.get("type") != "function":
        raise InvalidJob(f"tools must have the type 'function', got {tool.get('type')!r:.80}")
    # Responses have the function's parts beside the type.
    inner = tool.get("function", {name: part for name, part in tool.items() if name != "type"})
    if not isinstance(inner, Mapping):
        raise InvalidJob(f"tools must have an object as their function, got {inner!r:.80}")
    parts = {name: part for name, part in cast("Mapping[str, object]", inner).items() if part is not None}
    if unknown := parts.keys() - _KEYS:
        raise InvalidJob(f"tools must have only {', '.join(sorted(_KEYS))}, got {min(unknown)!r:.80}")
    raise_first(_function_checks(parts))
    try:
        return json.dumps(parts, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidJob(f"tools must have schemas that can be read: {error!s:.200}") from error


def _function_checks(parts: Mapping[str, object]) -> Iterator[Check]:
    name = parts.get("name")
    yield (
        isinstance(name, str) and NAME.fullmatch(name) is not None,
        f"tools must have names of {_NAME_RULE}; got {name!r:.80}",
    )
    yield is_text(parts.get("description", "")), "tools must have text as description"
    yield isinstance(parts.get("parameters", {}), Mapping), "tools must have a JSON schema as parameters"
    yield isinstance(parts.get("strict", True), bool), "tools must have true or false as strict"


def stored_choice(value: object) -> str:
    """Return a caller's value of the option `tool_choice` as it is stored.

    Raises:
        InvalidJob: it is neither a word nor a function.
    """
    if value is None:
        return AUTO
    if isinstance(value, Mapping):
        given = cast("Mapping[str, object]", value)
        inner = given.get("function", given)
        name = cast("Mapping[str, object]", inner).get("name") if isinstance(inner, Mapping) else None
        if given.get("type") == "function" and isinstance(name, str):
            return OF_FUNCTION + name
    elif isinstance(value, str) and (value in CHOICES or value.startswith(OF_FUNCTION)):
        return value
    raise InvalidJob(f"tool_choice must be one of {', '.join(CHOICES)}, or name a function; got {value!r:.100}")


def tool_checks(tools: object, choice: object) -> Iterator[Check]:
    """Yield the checks of the stored options."""
    yield is_listing(tools, is_text), "tools must be a list of texts, each a function in JSON"
    texts = cast("Sequence[str]", tools)
    yield len(texts) <= limits.MAX_TOOLS, f"tools may have {limits.MAX_TOOLS} functions, got {len(texts)}"
    num_chars = sum(map(len, texts))
    yield (
        num_chars <= limits.MAX_STRUCTURED_CHARS,
        f"tools must have at most {limits.MAX_STRUCTURED_CHARS} characters as JSON, got {num_chars}",
    )
    names = _names(texts)
    yield names is not None, "tools must be functions in JSON"
    twice = next((name for name in names or () if (names or ()).count(name) > 1), None)
    yield twice is None, f"tools must have different names, got {twice!r} twice"
    yield isinstance(choice, str), "tool_choice must be text"
    yield from _choice_checks(cast("str", choice), names or ())


def _choice_checks(choice: str, names: Sequence[str]) -> Iterator[Check]:
    yield choice in CHOICES or choice.startswith(OF_FUNCTION), f"tool_choice must be one of {', '.join(CHOICES)}"
    yield bool(names) or choice in (AUTO, NONE), f"tool_choice must be auto or none without tools, got {choice!r:.100}"
    named = choice.removeprefix(OF_FUNCTION)
    yield (
        choice in CHOICES or named in names,
        f"tool_choice must name one of the tools ({', '.join(names)[:200]}), got {named!r:.100}",
    )


def _names(texts: Sequence[str]) -> list[str] | None:
    """Return the names of stored functions; None if one is not a function."""
    try:
        return [Function.read(text).name for text in texts]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
