"""Parameters that constrain the output, as OpenAI and vLLM name them. No I/O. `Any` stands for JSON here."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from sluice.protocol.openai_format.refusals import RequestRefused

Structured = Mapping[str, Any]
"""A value of the option `structured`; empty for none."""

_VLLM_KINDS: Mapping[str, str] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
}
"""vLLM's names of our kinds."""


def read_structured(parameters: Mapping[str, Any]) -> tuple[Structured, str | None]:
    """Return what the output must match, and the parameter that says so.

    Raises:
        RequestRefused: a parameter is of the wrong type or not supported, or several constrain the output.
    """
    found = [(structured, name) for name, read in READERS.items() if (structured := read(name, parameters.get(name)))]
    if parameters.get("structured"):
        found.append((parameters["structured"], "structured"))
    if len(found) > 1:
        names = " and ".join(name for _, name in found)
        raise RequestRefused("invalid_request", f"{names} both constrain the output: give one", found[1][1])
    return found[0] if found else ({}, None)


def read_format(param: str, value: object) -> Structured:
    """Return what `response_format` of chats, or `text.format` of responses, demands.

    Raises:
        RequestRefused: it is of the wrong type, or not supported.
    """
    if value is None:
        return {}
    given = _object(param, value)
    match given.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            # Chats have the schema one level deeper.
            inner = _object(f"{param}.json_schema", given.get("json_schema", given))
            schema = inner.get("schema")
            if not isinstance(schema, dict):
                raise RequestRefused("invalid_request", f"{param} must have an object as its schema", param)
            return {"json_schema": schema}
        case other:
            raise RequestRefused("unsupported", f"{param} is not supported here with the type {other!r:.80}", param)


def _read_outputs(param: str, value: object) -> Structured:
    """Read vLLM's `structured_outputs`."""
    if value is None:
        return {}
    given = {name: part for name, part in _object(param, value).items() if part is not None and part is not False}
    if unknown := given.keys() - _VLLM_KINDS.keys():
        name = min(unknown)
        raise RequestRefused("unsupported", f"{name} in {param} is not supported here", f"{param}.{name}")
    return {_VLLM_KINDS[name]: part for name, part in given.items()}


def _object(param: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestRefused("invalid_request", f"{param} must be an object", param)
    return cast("dict[str, Any]", value)


def _guided(kind: str) -> Callable[[str, object], Structured]:
    return lambda _, value: {} if value is None else {kind: value}


READERS: Mapping[str, Callable[[str, object], Structured]] = {
    "response_format": read_format,
    "structured_outputs": _read_outputs,
    "guided_json": _guided("json_schema"),
    "guided_regex": _guided("regex"),
    "guided_choice": _guided("choice"),
    "guided_grammar": _guided("lark"),
}
"""By name of the parameter."""
