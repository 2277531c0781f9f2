"""Format responses as the objects of OpenAI's Responses API. No I/O.

All ids derive from the job, so every gateway formats a response with the same ids.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sluice.gateway.openai.items import Item, OutputItem, input_object, item_object, items_of, messages_of
from sluice.gateway.openapi.schemas import FLAG, METADATA, NUMBER, TEXT, Schema, list_of, object_schema, or_null
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.openai_format.bodies import CALLERS_CODES, Object
from sluice.protocol.openai_format.requests import ROLES
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, Usage

EndStatus = Literal["completed", "incomplete", "failed", "cancelled"]
Status = Literal["queued", "in_progress"] | EndStatus

LATE = "the response has not ended within its time limit"

DEFAULTS: Object = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a response that repeat the request, and their values if the request lacks them. The gateway does not know a
model's defaults."""


# ---------------------------------------------------------------- schemas

ANY_OBJECT: Schema = {"type": "object"}
FRACTION: Schema = {"type": "number"}
OUTPUT_TEXT = object_schema(
    "OutputText", type={"const": "output_text"}, text=TEXT, annotations=list_of({}), logprobs=list_of({})
)
INPUT_TEXT = object_schema("InputText", type={"const": "input_text"}, text=TEXT)
ROLE: Schema = {"enum": [*ROLES]}
STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}
MESSAGE = object_schema(
    "OutputMessage",
    id=TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    status=STATUS,
    content=list_of(OUTPUT_TEXT),
)
FUNCTION_CALL = object_schema(
    "FunctionCall",
    id=TEXT,
    type={"const": "function_call"},
    call_id=TEXT,
    name=TEXT,
    arguments={**TEXT, "description": "A JSON object."},
    status=STATUS,
)
REASONING = object_schema(
    "Reasoning",
    id=TEXT,
    type={"const": "reasoning"},
    summary=list_of({}),
    content=list_of(object_schema("ReasoningText", type={"const": "reasoning_text"}, text=TEXT)),
    status=STATUS,
)
OUTPUT_ITEM: Schema = {"anyOf": [MESSAGE, FUNCTION_CALL, REASONING]}
_INPUT_MESSAGE = object_schema(
    "InputMessage",
    id=TEXT,
    type={"const": "message"},
    role=ROLE,
    status=STATUS,
    content=list_of({"anyOf": [INPUT_TEXT, OUTPUT_TEXT]}),
)
_CALL_OUTPUT = object_schema(
    "FunctionCallOutput", id=TEXT, type={"const": "function_call_output"}, call_id=TEXT, output=TEXT, status=STATUS
)
INPUT_ITEM: Schema = {"anyOf": [_INPUT_MESSAGE, FUNCTION_CALL, _CALL_OUTPUT, REASONING]}
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
    output=list_of(OUTPUT_ITEM),
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
    tool_choice={"type": ["string", "object"]},
    tools=list_of(ANY_OBJECT),
    top_p=or_null(FRACTION),
    truncation={"const": "disabled"},
    user=or_null(TEXT),
    prompt_cache_key=TEXT,
    safety_identifier=TEXT,
)

# ---------------------------------------------------------------- objects


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseEnd:
    """How a response ended, and its output."""

    status: EndStatus
    text: str = ""
    """The whole raw output, also of a response that failed."""

    format: str = ""
    """How it marks its parts (`sluice.protocol.outputs`)."""

    usage: Object | None = None
    error: Object | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseInfo:
    """The facts about a response, without its output."""

    job_id: JobId
    created_ms: int
    model: str
    options: Object
    """The fields of `DEFAULTS` that the request gave."""

    previous_id: str | None = None
    is_background: bool = False
    is_stored: bool = True

    @property
    def id(self) -> str:
        """The id of the response."""
        return f"resp_{self.name}"

    @property
    def name(self) -> str:
        """The last part of all ids."""
        return split_job_id(self.job_id)[2]

    @property
    def item_id(self) -> str:
        """The beginning of the ids of the input's items."""
        return f"msg_{self.name}"

    @property
    def first_status(self) -> Status:
        """The status at creation."""
        return "queued" if self.is_background else "in_progress"


def response_end(
    state: JobState,
    finish_reason: str | None,
    output: tuple[str, str],
    usage: Usage | None,
    failure: tuple[str | None, str | None],
) -> ResponseEnd:
    """Return the end of a response from that of its job.

    Args:
        state: The job's.
        finish_reason: Of its only choice.
        output: The text, and the format in which it marks its parts.
        usage: The job's.
        failure: Its error code and error.
    """
    text, output_format = output
    if state is JobState.CANCELLED:
        return ResponseEnd(status="cancelled", text=text, format=output_format)
    if state is not JobState.DONE:
        code = "invalid_prompt" if failure[0] in CALLERS_CODES else "server_error"
        # A job that the queue ends at its deadline has a message; one that its worker ends has none.
        message = LATE if state is JobState.EXPIRED else failure[1] or str(state)
        return ResponseEnd(status="failed", text=text, format=output_format, error={"code": code, "message": message})
    status = "incomplete" if finish_reason == "length" else "completed"
    shown = None if usage is None else response_usage(usage)
    return ResponseEnd(status=status, text=text, format=output_format, usage=shown)


def response_object(info: ResponseInfo, status: Status, end: ResponseEnd | None = None) -> Object:
    """Format a response; without its end, its output is empty."""
    return {
        "id": info.id,
        "object": "response",
        "created_at": info.created_ms // 1000,
        "status": status,
        "background": info.is_background,
        "error": end.error if end is not None else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": info.model,
        "output": [] if end is None else output_items(info, end),
        "previous_response_id": info.previous_id,
        "store": info.is_stored,
        "usage": end.usage if end is not None else None,
        **DEFAULTS,
        **info.options,
    }


def output_items(info: ResponseInfo, end: ResponseEnd) -> list[Object]:
    """Format the output of an ended response: a message at least, or none if it failed before its first character."""
    is_whole = end.status in ("completed", "incomplete")
    status = "completed" if end.status == "completed" else "incomplete"
    items = items_of(end.format, end.text) or ([OutputItem("message", 0)] if is_whole else [])
    # Only the last one can be cut off.
    return [item_object(item, info.name, status if item is items[-1] else "completed") for item in items]


def response_usage(usage: Usage) -> Object:
    """Format the token counts of a job."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def conversation_messages(
    instructions: str | None,
    turns: Iterable[tuple[ResponseInfo, Iterable[Item], ResponseEnd]],
    new: Iterable[Item],
) -> list[Object]:
    """Return the prompt of a response: instructions, input and output of the responses it continues, and its input."""
    items: list[Item] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for info, turn_input, end in turns:
        answer = items_of(end.format, end.text) or [OutputItem("message", 0)]
        items += [*turn_input, *(item.as_input(info.name) for item in answer)]
    return messages_of([*items, *new])


def item_id_of(info: ResponseInfo, place: int) -> str:
    """Return the id of an item of the input."""
    return f"{info.item_id}_{place}"


def input_item(info: ResponseInfo, place: int, item: Item) -> Object:
    """Format one item of the input of a response."""
    return input_object(item, item_id_of(info, place))
