"""The descriptions of the routes of OpenAI's API and of health."""

from collections.abc import Mapping

from sluice.gateway.native.submit import CONTENT, KEY, TOKEN_ID, options_schema
from sluice.gateway.openapi.routes import EVENT, EVENTS, JSON, Answer, Parameter, RouteDoc, json_answer
from sluice.gateway.openapi.schemas import Schema, list_of, object_schema, or_null
from sluice.protocol.jobs import SAMPLING_NAMES
from sluice.protocol.openai_format.requests import CHAT, COMPLETIONS, ROLES, Endpoint

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
FINISH: Schema = {"enum": ["stop", "length", None]}
LOGPROBS: Schema = {"type": ["object", "null"]}

HEALTH = json_answer("It is.", object_schema("Health", status={"const": "ok"}))
LIVE = RouteDoc(tag="health", summary="Check that the process runs", answers={200: HEALTH})
READINESS = object_schema("Readiness", optional=("warnings",), status={"const": "ok"}, warnings=list_of(TEXT))
READY = RouteDoc(
    tag="health",
    summary="Check that Redis answers, and that keys are known",
    answers={200: json_answer("It is; `warnings` says what does not work all the same.", READINESS)},
)

ONE_MODEL = object_schema("Model", id=TEXT, object={"const": "model"}, created=NUMBER, owned_by=TEXT)
MODELS = RouteDoc(
    tag="openai",
    summary="List the models that workers serve",
    answers={
        200: json_answer("All of them.", object_schema("Models", object={"const": "list"}, data=list_of(ONE_MODEL)))
    },
)
MODEL = RouteDoc(
    tag="openai",
    summary="Show a model that workers serve",
    answers={200: json_answer("It is served.", ONE_MODEL)},
    errors=(404,),
    parameters=(Parameter(name="model", place="path", description="Name of a model; it may have slashes."),),
)

USAGE = object_schema(
    "CompletionUsage",
    prompt_tokens=NUMBER,
    completion_tokens=NUMBER,
    total_tokens=NUMBER,
    prompt_tokens_details=object_schema(cached_tokens=NUMBER),
)
CHAT_CHOICE = object_schema(
    "ChatChoice",
    index=NUMBER,
    message=object_schema(role={"const": "assistant"}, content=TEXT, refusal={"type": "null"}),
    logprobs=LOGPROBS,
    finish_reason=FINISH,
)
TEXT_CHOICE = object_schema("TextChoice", index=NUMBER, text=TEXT, logprobs=LOGPROBS, finish_reason=FINISH)
CHAT_PIECE = object_schema(
    "ChatPiece",
    index=NUMBER,
    delta=object_schema(role=TEXT, content=TEXT, optional=("role", "content")),
    logprobs=LOGPROBS,
    finish_reason=FINISH,
)


CHAT_MESSAGE = object_schema("ChatMessage", role={"enum": [*ROLES]}, content=CONTENT, name=TEXT, optional=("name",))
TEXT_PROMPT: Schema = {"anyOf": [{**TEXT, "minLength": 1}, {**list_of(TOKEN_ID), "minItems": 1}]}


def _envelope(title: str, kind: str, choice: Schema, usage: Schema, *, has_usage: bool) -> Schema:
    return object_schema(
        title,
        optional=() if has_usage else ("usage",),
        id=TEXT,
        object={"const": kind},
        created=NUMBER,
        model=TEXT,
        choices=list_of(choice),
        usage=usage,
    )


WHOLE: Mapping[Endpoint, Schema] = {
    CHAT: _envelope("ChatCompletion", "chat.completion", CHAT_CHOICE, USAGE, has_usage=True),
    COMPLETIONS: _envelope("Completion", "text_completion", TEXT_CHOICE, USAGE, has_usage=True),
}
CHUNK: Mapping[Endpoint, Schema] = {
    CHAT: _envelope("ChatChunk", "chat.completion.chunk", CHAT_PIECE, or_null(USAGE), has_usage=False),
    COMPLETIONS: _envelope("CompletionChunk", "text_completion", TEXT_CHOICE, or_null(USAGE), has_usage=False),
}


def generation_doc(endpoint: Endpoint) -> RouteDoc:
    """Return the description of a route that generates text."""
    return RouteDoc(
        tag="openai",
        summary="Answer a chat" if endpoint == CHAT else "Continue a text",
        answers={
            200: Answer(
                description="The output: whole, or with `stream` as events. The last is `[DONE]`, or an error.",
                content={JSON: WHOLE[endpoint], EVENTS: EVENT},
                events={"": CHUNK[endpoint]},
            )
        },
        errors=(404, 409, 422, 504),
        parameters=(KEY,),
        body={JSON: _body(endpoint)},
    )


def _body(endpoint: Endpoint) -> Schema:
    """Return the schema of a request: what the queue takes, by OpenAI's names."""
    own = {name: schema for name, schema in options_schema().items() if name in SAMPLING_NAMES | EXTRA}
    stream = {"stream": FLAG, "stream_options": object_schema(include_usage=FLAG, optional=("include_usage",))}
    if endpoint == CHAT:
        top = own.pop("logprobs")
        chat = {"max_completion_tokens": own["max_tokens"], "logprobs": FLAG, "top_logprobs": top}
        return _request("ChatRequest", "messages", {**list_of(CHAT_MESSAGE), "minItems": 1}, {**own, **chat, **stream})
    return _request("CompletionRequest", "prompt", TEXT_PROMPT, {**own, **stream})


EXTRA = frozenset({"seed", "model", "metadata", "add_special_tokens", "priority"})


def _request(title: str, prompt: str, schema: Schema, optional: Mapping[str, Schema]) -> Schema:
    return object_schema(title, optional=tuple(optional), **{prompt: schema}, **optional)
