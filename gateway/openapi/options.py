"""The schema of the options of jobs, with the bounds that `template` checks."""

from collections.abc import Collection, Mapping

from sluice.gateway.openapi.routes import text
from sluice.gateway.openapi.schemas import TEXT, Schema, list_of, object_schema, schema_of
from sluice.protocol import limits
from sluice.protocol.jobs import Options

BOUNDS: Mapping[str, tuple[float, float]] = {
    "max_tokens": (1, limits.MAX_TOKENS),
    "n": (1, limits.MAX_CHOICES),
    "logprobs": (0, limits.MAX_LOGPROBS),
    "priority": (0, limits.MAX_PRIORITY),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "min_tokens": (0, limits.MAX_TOKENS),
    "temperature": (0, 10_000),
    "top_k": (0, 2**31 - 1),
    "repetition_penalty": (0.001, 1000),
    "seed": (0, 2**64 - 1),
}


def _short(most: int, least: int = 1) -> Schema:
    return {"minLength": least, "maxLength": most}


_STOP: Schema = {**TEXT, **_short(limits.MAX_STOP_CHARS)}
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
SHAPES: Mapping[str, Schema] = {
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "ttl_s": {"exclusiveMinimum": 0, "exclusiveMaximum": limits.MAX_TTL_S},
    "stop": {"anyOf": [_STOP, {**list_of(_STOP), "maxItems": limits.MAX_STOPS}]},
    "stop_token_ids": {"items": TOKEN_ID, "maxItems": limits.MAX_STOP_TOKEN_IDS},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": limits.MAX_LOGIT_BIAS,
    },
    "model": _short(limits.MAX_MODEL_CHARS),
    "metadata": {
        "propertyNames": _short(limits.MAX_METADATA_KEY_CHARS),
        "additionalProperties": {**TEXT, **_short(limits.MAX_METADATA_VALUE_CHARS, 0)},
        "maxProperties": limits.MAX_METADATA_PAIRS,
    },
    "idempotency_key": _short(limits.MAX_IDEMPOTENCY_KEY_CHARS),
    "traceparent": _short(limits.MAX_TRACEPARENT_CHARS),
    "batch": {"pattern": f"^[A-Za-z0-9_.:-]{{1,{limits.MAX_BATCH_CHARS}}}$"},
    "callback_url": {"pattern": "^https?://", "maxLength": limits.MAX_URL_CHARS},
}
"""Bounds of what is no single number."""

KEY = text("Idempotency-Key", "A second request with the same key returns the first's job.", place="header")
CONTENT: Schema = {"anyOf": [TEXT, list_of(object_schema("TextPart", type={"const": "text"}, text=TEXT))]}
"""Content of a message."""


def options_schema(names: Collection[str]) -> dict[str, Schema]:
    """Return the schemas of those options of jobs that a request may have."""
    properties: dict[str, Schema] = schema_of(Options)["properties"]
    bounds = {name: {"minimum": least, "maximum": most} for name, (least, most) in BOUNDS.items()}
    return {
        name: {**schema, **bounds.get(name, {}), **SHAPES.get(name, {})}
        for name, schema in properties.items()
        if name in names
    }
