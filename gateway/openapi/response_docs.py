"""The descriptions of the routes of responses."""

from sluice.gateway.native.submit import KEY, options_schema
from sluice.gateway.openai.response_requests import PART_TYPES
from sluice.gateway.openapi.file_docs import FLAG, NUMBER, TEXT, page_parameters, page_schema
from sluice.gateway.openapi.openai_docs import EXTRA
from sluice.gateway.openapi.routes import EVENT, EVENTS, JSON, Answer, Parameter, RouteDoc, json_answer
from sluice.gateway.openapi.schemas import Schema, list_of, object_schema, or_null
from sluice.gateway.tables.pages import SHORT_PAGE
from sluice.protocol.jobs import SAMPLING_NAMES

ANY_OBJECT: Schema = {"type": "object"}
FRACTION: Schema = {"type": "number"}
METADATA: Schema = {"type": "object", "additionalProperties": TEXT}
OUTPUT_TEXT = object_schema(
    "OutputText", type={"const": "output_text"}, text=TEXT, annotations=list_of({}), logprobs=list_of({})
)
INPUT_TEXT = object_schema("InputText", type={"const": "input_text"}, text=TEXT)
ROLE: Schema = {"enum": ["user", "assistant", "system", "developer"]}
STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}
MESSAGE = object_schema(
    "OutputMessage",
    id=TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    status=STATUS,
    content=list_of(OUTPUT_TEXT),
)
INPUT_ITEM = object_schema(
    "InputItem",
    id=TEXT,
    type={"const": "message"},
    role=ROLE,
    status=STATUS,
    content=list_of({"anyOf": [INPUT_TEXT, OUTPUT_TEXT]}),
)
USAGE = object_schema(
    "ResponseUsage",
    input_tokens=NUMBER,
    input_tokens_details=object_schema(cached_tokens=NUMBER, cache_write_tokens=NUMBER),
    output_tokens=NUMBER,
    output_tokens_details=object_schema(reasoning_tokens=NUMBER),
    total_tokens=NUMBER,
)
RESPONSE = object_schema(
    "Response",
    optional=("prompt_cache_key", "safety_identifier"),
    id=TEXT,
    object={"const": "response"},
    created_at=NUMBER,
    status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    background=FLAG,
    error=or_null(object_schema(code={"enum": ["server_error", "invalid_prompt"]}, message=TEXT)),
    incomplete_details=or_null(object_schema(reason={"const": "max_output_tokens"})),
    model=TEXT,
    output=list_of(MESSAGE),
    previous_response_id=or_null(TEXT),
    store=FLAG,
    usage=or_null(USAGE),
    instructions=or_null(TEXT),
    max_output_tokens=or_null(NUMBER),
    metadata=METADATA,
    parallel_tool_calls=FLAG,
    reasoning=ANY_OBJECT,
    temperature=or_null(FRACTION),
    text=ANY_OBJECT,
    tool_choice=TEXT,
    tools=list_of({}),
    top_p=or_null(FRACTION),
    truncation={"const": "disabled"},
    user=or_null(TEXT),
    prompt_cache_key=TEXT,
    safety_identifier=TEXT,
)

# ---------------------------------------------------------------- events


def _event(kind: str, fields: dict[str, Schema]) -> Schema:
    properties = {"type": {"const": kind}, "sequence_number": NUMBER, **fields}
    return {"type": "object", "properties": properties, "required": list(properties)}


_PLACE: Schema = {"item_id": TEXT, "output_index": NUMBER, "content_index": NUMBER}
_OF_EVENTS: dict[str, dict[str, Schema]] = {
    **{f"response.{kind}": {"response": RESPONSE} for kind in ("created", "in_progress")},
    **{f"response.output_item.{kind}": {"output_index": NUMBER, "item": MESSAGE} for kind in ("added", "done")},
    **{f"response.content_part.{kind}": {**_PLACE, "part": OUTPUT_TEXT} for kind in ("added", "done")},
    "response.output_text.delta": {**_PLACE, "delta": TEXT, "logprobs": list_of({})},
    "response.output_text.done": {**_PLACE, "text": TEXT, "logprobs": list_of({})},
    **{f"response.{kind}": {"response": RESPONSE} for kind in ("completed", "incomplete", "failed")},
    "error": {"message": TEXT, "code": or_null(TEXT), "param": or_null(TEXT), "error": ANY_OBJECT},
}
_STREAM = Answer(
    description="The response; with `stream` its events.",
    content={JSON: RESPONSE, EVENTS: EVENT},
    events={kind: _event(kind, fields) for kind, fields in _OF_EVENTS.items()},
)

# ---------------------------------------------------------------- requests

_OWN: dict[str, Schema] = {
    name: schema
    for name, schema in options_schema().items()
    if name in SAMPLING_NAMES | EXTRA and name not in ("n", "logprobs")
}
_MAX_TOKENS = _OWN.pop("max_tokens")
_ITEM = object_schema(
    "NewItem",
    optional=("type", "id", "status", "phase"),
    type={"const": "message"},
    role=ROLE,
    content={"anyOf": [TEXT, list_of(object_schema(None, type={"enum": [*PART_TYPES]}, text=TEXT))]},
    id=TEXT,
    status=TEXT,
    phase=TEXT,
)
_INPUT: Schema = {"anyOf": [{**TEXT, "minLength": 1}, {**list_of(_ITEM), "minItems": 1}]}
_OPTIONAL: dict[str, Schema] = {
    **_OWN,
    "instructions": TEXT,
    "max_output_tokens": _MAX_TOKENS,
    "previous_response_id": TEXT,
    "background": FLAG,
    "store": FLAG,
    "stream": FLAG,
}
NEW_RESPONSE = object_schema("NewResponse", optional=tuple(_OPTIONAL), input=_INPUT, **_OPTIONAL)
ONE = (Parameter(name="response_id", place="path", description="Id of a response."),)
_ANSWER = {200: json_answer("The response.", RESPONSE)}
_DELETED = object_schema("DeletedResponse", id=TEXT, object={"const": "response"}, deleted={"const": True})

CREATE = RouteDoc(
    tag="responses",
    summary="Create a response",
    answers={200: _STREAM},
    errors=(404, 409, 422, 504),
    parameters=(KEY,),
    body={JSON: NEW_RESPONSE},
)
RETRIEVE = RouteDoc(
    tag="responses",
    summary="Describe a response, or stream its events",
    answers={200: _STREAM},
    errors=(404,),
    parameters=(
        *ONE,
        Parameter(name="stream", place="query", description="Whether to answer with events.", schema=FLAG),
        Parameter(
            name="starting_after", place="query", description="Number of the last event that is known.", schema=NUMBER
        ),
    ),
)
CANCEL = RouteDoc(
    tag="responses", summary="Cancel a response in the background", answers=_ANSWER, errors=(404,), parameters=ONE
)
DELETE = RouteDoc(
    tag="responses",
    summary="Delete a response",
    answers={200: json_answer("It is deleted.", _DELETED)},
    errors=(404,),
    parameters=ONE,
)
INPUT_ITEMS = RouteDoc(
    tag="responses",
    summary="List the input of a response",
    answers={200: json_answer("One page.", page_schema("InputItems", INPUT_ITEM))},
    errors=(404,),
    parameters=(*ONE, *page_parameters(SHORT_PAGE)),
)
