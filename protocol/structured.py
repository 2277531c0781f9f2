"""The option `structured` of a job: what the text of each choice must match. Knows no engine and compiles nothing.

A caller gives one pair, kind and value. It is stored as one pair, kind and text, which is what compilers read.
"""

import json
from collections.abc import Mapping
from typing import cast

from sluice.protocol import limits
from sluice.protocol.checks import is_listing, is_text
from sluice.protocol.errors import InvalidJob

KINDS: Mapping[str, str] = {
    "json_schema": "a JSON schema",
    "json_object": "true",
    "regex": "a regular expression",
    "lark": "a grammar in Lark's form",
    "choice": "a list of texts",
}
"""By kind, what its value is."""


def stored_structured(value: object) -> Mapping[str, str]:
    """Return a caller's value of the option as it is stored; empty for None.

    Raises:
        InvalidJob: it is not one of a kind's values.
    """
    if value is None or value == {}:
        return {}
    pairs = _pairs(value)
    if len(pairs) != 1 or not pairs.keys() <= KINDS.keys():
        given = ", ".join(map(repr, pairs)) if pairs else type(value).__name__
        raise InvalidJob(f"structured must have exactly one of {', '.join(KINDS)}, got {given:.100}")
    [(kind, inner)] = pairs.items()
    text = _text(str(kind), inner)
    if text is None:
        raise InvalidJob(f"structured must have {KINDS[str(kind)]} as {kind}, got {inner!r:.100}")
    return {str(kind): text}


def _pairs(value: object) -> Mapping[object, object]:
    # The cast only states that keys and values are not checked yet.
    return cast("Mapping[object, object]", value) if isinstance(value, Mapping) else dict[object, object]()


def _text(kind: str, value: object) -> str | None:
    """Return the value of a kind as text; None if it is none."""
    match kind:
        case "json_object":
            return "" if value is True else None
        case "json_schema":
            return _schema_text(value)
        case "choice":
            are_texts = is_listing(value, lambda item: is_text(item) and item != "")
            return json.dumps(value, ensure_ascii=False) if are_texts and value else None
        case _:
            return value if isinstance(value, str) and value else None


def _schema_text(value: object) -> str | None:
    """Return a schema, given as JSON or as its text, as text. The order of its properties is kept: outputs have it."""
    try:
        schema: object = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping):
            return None
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidJob(f"structured must have a JSON schema that can be read: {error!s:.200}") from error


def check_stored(value: object) -> None:
    """Check the stored form.

    Raises:
        InvalidJob: it is not one pair of a kind and text, or is too long.
    """
    if value == {}:
        return
    pairs = _pairs(value)
    if len(pairs) != 1 or not pairs.keys() <= KINDS.keys() or not all(map(is_text, pairs.values())):
        raise InvalidJob(f"structured must be one pair of text, its kind one of {', '.join(KINDS)}")
    [text] = map(str, pairs.values())
    if len(text) > limits.MAX_STRUCTURED_CHARS:
        raise InvalidJob(
            f"structured must have at most {limits.MAX_STRUCTURED_CHARS} characters, as JSON or text; got {len(text)}"
        )
