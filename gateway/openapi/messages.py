"""The schemas of chat messages and of calls of functions."""

from collections.abc import Sequence

from sluice.gateway.openapi.options import CONTENT
from sluice.gateway.openapi.schemas import NUMBER, TEXT, Schema, list_of, object_schema, or_null

_FUNCTION = object_schema(None, name=TEXT, arguments={**TEXT, "description": "A JSON object."})
TOOL_CALL = object_schema("ToolCall", id=TEXT, type={"const": "function"}, function=_FUNCTION)
CALL_PIECE = object_schema(
    "ToolCallPiece",
    optional=("id", "type"),
    index=NUMBER,
    id=TEXT,
    type={"const": "function"},
    function=object_schema(None, optional=("name",), name=TEXT, arguments=TEXT),
)


def message_schema(title: str, roles: Sequence[str]) -> Schema:
    """Return the schema of a message of a chat."""
    return object_schema(
        title,
        optional=("content", "name", "reasoning_content", "tool_calls", "tool_call_id"),
        role={"enum": [*roles]},
        content=or_null(CONTENT),
        name=TEXT,
        reasoning_content=TEXT,
        tool_calls=list_of(TOOL_CALL),
        tool_call_id=TEXT,
    )
