"""Read the body of a request to OpenAI's Responses API. No I/O. `Any` stands for JSON here."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from sluice.gateway.openapi.options import options_schema
from sluice.gateway.openapi.schemas import FLAG, TEXT, Schema, list_of, object_schema, or_null
from sluice.protocol.openai_format.requests import (
    OF_TOOLS,
    PROMPT,
    ROLES,
    SAME,
    Harmless,
    RequestRefused,
    check_number,
    check_role,
    read_bias,
    read_flag,
    read_parameters,
    refuse_unless_harmless,
)
from sluice.protocol.openai_format.structured import read_format
from sluice.protocol.sampling import OPTIONS

RENAMED = {name: option.in_responses for name, option in OPTIONS.items() if option.in_responses}
NAMES = {PROMPT: "input", **RENAMED, "structured": "text.format"}
"""The API's names of the prompt and of renamed options, by ours."""

PART_TYPES = ("input_text", "output_text", "text", "reasoning_text")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """A request for a response."""

    input: tuple[dict[str, Any], ...]
    """Items in our form (`items`)."""

    options: dict[str, Any]
    """Options of the job."""

    shown: dict[str, Any]
    """Parameters that the response repeats."""

    previous_id: str | None
    is_stream: bool
    is_background: bool
    is_stored: bool

    @property
    def model(self) -> str | None:
        """The requested model."""
        return self.options.get("model")

    @property
    def instructions(self) -> str | None:
        """A system message before the conversation."""
        return self.shown.get("instructions")


def read_response_request(body: object) -> ResponseRequest:
    """Check and parse a request.

    Raises:
        RequestRefused: a parameter is unknown, not supported or of the wrong type.
    """
    parameters = read_parameters(body)
    is_background, is_stored = read_flag(parameters, "background"), read_flag(parameters, "store", is_default=True)
    if is_background and not is_stored:
        raise RequestRefused("invalid_request", "background: true needs store: true", "background")
    return ResponseRequest(
        input=tuple(_input(parameters.get("input"))),
        options=_options(parameters),
        shown={name: parameters[name] for name in _SHOWN if name in parameters},
        previous_id=_text(parameters, "previous_response_id"),
        is_stream=read_flag(parameters, "stream"),
        is_background=is_background,
        is_stored=is_stored,
    )


# ---------------------------------------------------------------- parameters

_PASSED = (SAME | OF_TOOLS) - {name for name, option in OPTIONS.items() if option.in_responses != ""}
"""Parameters passed on unchanged: OpenAI's and those that open servers add."""

_SHOWN = (
    *(
        "instructions",
        "max_output_tokens",
        "metadata",
        "parallel_tool_calls",
        "temperature",
        "tool_choice",
        "tools",
        "top_p",
    ),
    *("prompt_cache_key", "safety_identifier", "text", "user"),
)

_READ = frozenset(
    {"input", "instructions", "background", "store", "stream", "previous_response_id", "logit_bias", "text"}
    | {*RENAMED.values()}
)
"""Parameters that are read elsewhere."""

_IGNORED = frozenset(
    {"user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "stream_options"}
    | {"max_tool_calls"}
)
"""Parameters that do not affect the output."""

_TEXTS = ("instructions", "model", "prompt_cache_key", "safety_identifier", "user")

_HARMLESS: Harmless = {
    "include": lambda value: value == [],
    "truncation": lambda value: value == "disabled",
    "reasoning": lambda value: value in ({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
    "top_logprobs": lambda value: value == 0,
    "n": lambda value: value == 1,
}


def _structured(text: object) -> dict[str, Any]:
    """Return the option that `text.format` demands, if any.

    Raises:
        RequestRefused: a member of `text` is not supported.
    """
    if text is None:
        return {}
    if not isinstance(text, dict):
        raise RequestRefused("invalid_request", "text must be an object", "text")
    given = cast("dict[str, Any]", text)
    for name, value in given.items():
        if name != "format" and value not in (None, {"verbosity": "medium"}.get(name)):
            message = f"{name} in text is not supported here as {value!r:.80}"
            raise RequestRefused("unsupported", message, f"text.{name}")
    structured = read_format("text.format", given.get("format"))
    return {"structured": structured} if structured else {}


def _options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: parameters[name] for name in parameters if name in _PASSED}
    for name in parameters.keys() - _PASSED - _READ - _IGNORED:
        refuse_unless_harmless(name, parameters[name], _HARMLESS, _PASSED | _READ)
    options |= {name: parameters[renamed] for name, renamed in RENAMED.items() if renamed in parameters}
    for name in _TEXTS:
        _text(parameters, name)
    if "\0" in parameters.get("model", ""):  # PostgreSQL cannot store it as text
        raise RequestRefused("invalid_request", "model must not contain NUL", "model")
    return options | read_bias(parameters) | _structured(parameters.get("text"))


def _text(parameters: Mapping[str, Any], name: str) -> str | None:
    value = parameters.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestRefused("invalid_request", f"{name} must be text", name)
    return value


# ---------------------------------------------------------------- input


def _input(value: object) -> Iterable[dict[str, Any]]:
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise RequestRefused("invalid_request", "input must be text, or a list with one message or more", "input")
    check_number(cast("list[object]", value), "input")
    return [_item(f"input[{place}]", item) for place, item in enumerate(cast("list[object]", value))]


def _item(at: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestRefused("invalid_request", "an item of the input must be an object", at)
    item = cast("dict[str, Any]", value)
    kind = item.get("type") or "message"
    match kind:
        case "message":
            return _message(at, item)
        case "function_call":
            return {"type": kind, **{name: _text_of(at, item, name) for name in ("call_id", "name", "arguments")}}
        case "function_call_output":
            output = _content(item.get("output"), f"{at}.output")
            return {"type": kind, "call_id": _text_of(at, item, "call_id"), "output": output}
        case "reasoning":
            return {"type": kind, "text": _content(item.get("content") or "", f"{at}.content")}
        case _:
            message = f"input items of type {json.dumps(kind)[:80]} are not supported"
            raise RequestRefused("unsupported", message, f"{at}.type")


def _text_of(at: str, item: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := item.get(name), str):
        raise RequestRefused("invalid_request", f"{name} of an item must be text", f"{at}.{name}")
    return value


def _message(at: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    check_role(role, f"{at}.role")
    # Further fields that items of an earlier output have; they mean nothing to a model.
    if unsupported := item.keys() - {"type", "role", "content", "id", "status", "phase"}:
        name = min(unsupported)
        raise RequestRefused("unsupported", f"{name} in a message is not supported here", f"{at}.{name}")
    return {"role": role, "content": _content(item.get("content"), f"{at}.content")}


def _content(content: object, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused("invalid_request", "a message's content must be text or a list of parts", param)
    return "".join(_part_text(part, param) for part in cast("list[object]", content))


def _part_text(value: object, param: str) -> str:
    part = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    kind, text = part.get("type"), part.get("text")
    if kind not in PART_TYPES or not isinstance(text, str):
        raise RequestRefused(
            "unsupported", f"content of type {json.dumps(kind)[:80]} is not supported: give text", param
        )
    return text


# ---------------------------------------------------------------- its schema

_OPTIONS = {
    NAMES.get(name, name): schema for name, schema in options_schema({*_PASSED, *RENAMED, "logit_bias"}).items()
}
_CONTENT: Schema = {"anyOf": [TEXT, list_of(object_schema(None, type={"enum": [*PART_TYPES]}, text=TEXT))]}
_NEW_MESSAGE = object_schema(
    "NewMessage",
    optional=("type", "id", "status", "phase"),
    type={"const": "message"},
    role={"enum": [*ROLES]},
    content=_CONTENT,
    id=TEXT,
    status=TEXT,
    phase=TEXT,
)
_NEW_CALL = object_schema("NewFunctionCall", type={"const": "function_call"}, call_id=TEXT, name=TEXT, arguments=TEXT)
_NEW_OUTPUT = object_schema(
    "NewFunctionCallOutput", type={"const": "function_call_output"}, call_id=TEXT, output=_CONTENT
)
_NEW_REASONING = object_schema(
    "NewReasoning", optional=("content",), type={"const": "reasoning"}, content=or_null(_CONTENT)
)
_ITEM: Schema = {"anyOf": [_NEW_MESSAGE, _NEW_CALL, _NEW_OUTPUT, _NEW_REASONING]}
_INPUT: Schema = {"anyOf": [{**TEXT, "minLength": 1}, {**list_of(_ITEM), "minItems": 1}]}
_OPTIONAL: dict[str, Schema] = {
    **_OPTIONS,
    "instructions": TEXT,
    "previous_response_id": TEXT,
    "background": FLAG,
    "store": FLAG,
    "stream": FLAG,
}
NEW_RESPONSE = object_schema("NewResponse", optional=tuple(_OPTIONAL), input=_INPUT, **_OPTIONAL)
