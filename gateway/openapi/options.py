"""The schema of the options of jobs, with the bounds that `template` checks."""

from collections.abc import Collection, Mapping

from sluice.gateway.openapi.routes import text
from sluice.gateway.openapi.schemas import TEXT, Schema, list_of, object_schema, schema_of
from sluice.protocol import limits
from sluice.protocol.jobs import Options
from sluice.protocol.sampling import OPTIONS
from sluice.protocol.sampling import TOKEN_ID as OPTION_TOKEN_ID


def _short(most: int, least: int = 1) -> Schema:
    return {"minLength": least, "maxLength": most}


SHAPES: Mapping[str, Schema] = {
    "ttl_s": {"exclusiveMinimum": 0, "exclusiveMaximum": limits.MAX_TTL_S},
    "seed": {"minimum": 0, "maximum": 2**64 - 1},
    "priority": {"minimum": 0, "maximum": limits.MAX_PRIORITY},
    "model": _short(limits.MAX_MODEL_CHARS),
    "metadata": {
        "propertyNames": _short(limits.MAX_METADATA_KEY_CHARS),
        "additionalProperties": {**TEXT, **_short(limits.MAX_METADATA_VALUE_CHARS, 0)},
        "maxProperties": limits.MAX_METADATA_PAIRS,
    },
    "idempotency_key": _short(limits.MAX_IDEMPOTENCY_KEY_CHARS),
    "traceparent": _short(limits.MAX_TRACEPARENT_CHARS),
    "tools": {"maxItems": limits.MAX_TOOLS},
    "batch": {"pattern": f"^[A-Za-z0-9_.:-]{{1,{limits.MAX_BATCH_CHARS}}}$"},
    "callback_url": {"pattern": "^https?://", "maxLength": limits.MAX_URL_CHARS},
}
"""Schemas of the jobs' options that are not sampling options."""

TOKEN_ID: Schema = dict(OPTION_TOKEN_ID)
KEY = text("Idempotency-Key", "A second request with the same key returns the first's job.", place="header")
CONTENT: Schema = {"anyOf": [TEXT, list_of(object_schema("TextPart", type={"const": "text"}, text=TEXT))]}
"""Content of a message."""


def options_schema(names: Collection[str]) -> dict[str, Schema]:
    """Return the schemas of the named options of jobs."""
    properties: dict[str, Schema] = schema_of(Options)["properties"]
    bounds = {**{name: option.schema for name, option in OPTIONS.items()}, **SHAPES}
    return {name: {**schema, **bounds.get(name, {})} for name, schema in properties.items() if name in names}
