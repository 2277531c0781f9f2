"""JSON Schemas of the types in requests and responses. No I/O."""

import ast
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Any, Literal, NewType, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

Schema = dict[str, Any]
"""A JSON Schema. One with a `title` becomes a component of the document with that name."""

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
METADATA: Schema = {"type": "object", "additionalProperties": TEXT}

PLAIN: Mapping[object, Schema] = {
    str: TEXT,
    int: NUMBER,
    float: {"type": "number"},
    bool: FLAG,
    type(None): {"type": "null"},
    # Text, or a list of bytes if they are not valid UTF-8.
    bytes: {"type": ["string", "array"], "items": {"type": "integer", "minimum": 0, "maximum": 255}},
    datetime: {"type": "string", "format": "date-time", "description": "A point in time, with its zone."},
    timedelta: {"type": "number", "minimum": 0, "description": "Seconds from now."},
}


def schema_of(kind: Any) -> Schema:  # noqa: ANN401  # a type, or what typing makes of several
    """Return the schema of a type's values in JSON; an unknown type accepts everything."""
    if kind in PLAIN:
        return dict(PLAIN[kind])
    if isinstance(kind, NewType):
        return schema_of(kind.__supertype__)
    if is_dataclass(kind) or is_typeddict(kind):
        return _schema_of_class(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"type": "string", "enum": [member.value for member in kind]}
    return _schema_of_generic(kind)


def object_schema(title: str | None = None, /, *, optional: Sequence[str] = (), **properties: Schema) -> Schema:
    """Return the schema of an object with these properties; those named in `optional` may be missing."""
    required = [name for name in properties if name not in optional]
    named = {} if title is None else {"title": title}
    return {**named, "type": "object", "properties": properties, "required": required}


def list_of(item: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": item}


def or_null(schema: Schema) -> Schema:
    """Return the schema of a value that may be null."""
    return {"anyOf": [schema, {"type": "null"}]}


def _schema_of_generic(kind: Any) -> Schema:  # noqa: ANN401  # as above
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return {"anyOf": [schema_of(part) for part in parts]}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin is tuple and parts[-1] is not Ellipsis:
        return {"type": "array", "prefixItems": [schema_of(part) for part in parts], "items": False}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(parts[1])}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return list_of(schema_of(parts[0]))
    return {}


@cache
def _schema_of_class(kind: type) -> Schema:
    name, docs = kind.__name__, _docs_of(kind)
    schemas = {name: schema_of(hint) for name, hint in get_type_hints(kind).items()}
    # A schema with a title is described where it is declared.
    properties = {
        name: schema if "title" in schema else {**schema, **docs.get(name, {})} for name, schema in schemas.items()
    }
    required = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    return {"title": name, "type": "object", "properties": properties, "required": required}


@cache
def _classes_of(module: str) -> Mapping[str, ast.ClassDef]:
    """Return the classes of a module's source. Cached: `inspect.getsource(kind)` parses the module for each class."""
    parsed = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in parsed.body if isinstance(node, ast.ClassDef)}


def _docs_of(kind: type) -> Mapping[str, Schema]:
    """Return the descriptions of a class's attributes, which are the strings that follow them."""
    docs: dict[str, Schema] = {}
    definition = _classes_of(kind.__module__)[kind.__name__]
    for base in definition.bases:  # from the source: a TypedDict does not know its bases
        base_class = getattr(sys.modules[kind.__module__], base.id, None) if isinstance(base, ast.Name) else None
        if is_dataclass(base_class) or is_typeddict(base_class):
            docs |= _docs_of(cast("type", base_class))
    for before, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(before.target, ast.Name)
            docs[before.target.id] = {"description": inspect.cleandoc(str(after.value.value))}
    return docs
