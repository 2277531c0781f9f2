"""Parse the body of a request in OpenAI's format. No I/O. `Any` stands for JSON here.

HTTP requests, lines of batches and lines of bulk files are all parsed here, so the same rules apply to each.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol, TypeAlias, cast

from sluice.protocol import limits
from sluice.protocol.checks import is_short
from sluice.protocol.errors import InvalidJob, InvalidPrompt, did_you_mean
from sluice.protocol.jobs import MESSAGE_FIELDS, OPTION_NAMES, SAMPLING_NAMES, Options, PromptLike, joined_text
from sluice.protocol.openai_format.refusals import RequestRefused
from sluice.protocol.openai_format.structured import READERS, read_structured
from sluice.protocol.wire import JobResult

MAX_TOKEN_ID_DIGITS = 10
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank"]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"
EMBEDDINGS: Endpoint = "/v1/embeddings"
RERANK: Endpoint = "/v1/rerank"
ENDPOINTS: tuple[Endpoint, ...] = (CHAT, COMPLETIONS)
"""Those that generate text."""

LINE_ENDPOINTS: tuple[Endpoint, ...] = (*ENDPOINTS, EMBEDDINGS, RERANK)
"""Those of requests in the lines of a file."""


PROMPT = "prompt"
"""Key of the prompt in `names`."""


class ManyPrompts(Protocol):
    """A request each of whose prompts is a job."""

    @property
    def prompts(self) -> Sequence[PromptLike]:
        """The prompts, at least one."""
        ...

    def body(self, results: Sequence[JobResult], name: str, model: str, /) -> dict[str, Any]:
        """Format the results of its jobs, in the order of the prompts; `name`: that of the first job.

        Raises:
            RequestRefused: this model cannot answer it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A request with known parameters of the right types. The values of options are checked with the job."""

    endpoint: Endpoint
    prompt: PromptLike
    options: Options
    """Options of the job, without `stream`."""

    is_stream: bool = False
    has_usage: bool = False
    """Whether a stream ends with a chunk with the usage."""

    names: Mapping[str, str]
    """The client's names of the prompt and of renamed options, by ours."""

    many: ManyPrompts | None = None
    """The request, if its prompts are jobs whose results are one body; `prompt` is the first."""

    @property
    def model(self) -> str | None:
        """The requested model."""
        return self.options.get("model")

    @property
    def num_choices(self) -> int:
        """The number of choices."""
        return self.options.get("n", 1)

    @property
    def is_shared(self) -> bool:
        """Whether requests with the same idempotency key may read the same job."""
        return self.options.get("idempotency_key") is not None


def read_request(endpoint: Endpoint, body: object) -> ReadRequest:
    """Parse a request.

    Raises:
        RequestRefused: a parameter is unknown, not supported or of the wrong type.
    """
    parameters = read_parameters(body)
    prompt = _chat_prompt(parameters) if endpoint == CHAT else _completion_prompt(parameters)
    options = _options(endpoint, parameters)
    is_stream, has_usage = _stream(parameters)
    return ReadRequest(
        endpoint=endpoint,
        prompt=prompt,
        options=cast("Options", options),
        is_stream=is_stream,
        has_usage=has_usage,
        names=_names(endpoint, parameters),
    )


def refusal(error: InvalidJob, names: Mapping[str, str]) -> RequestRefused:
    """Return the refusal of an invalid job, with the client's names of parameters.

    Messages about the value of an option begin with its name.
    """
    message = str(error)
    if isinstance(error, InvalidPrompt):
        return RequestRefused("invalid_request", message, names.get(PROMPT))
    name, _, rest = message.partition(" ")
    if name not in OPTION_NAMES:
        return RequestRefused("invalid_request", message)
    param = names.get(name, name)
    return RequestRefused("invalid_request", f"{param} {rest}", param)


def decoded_json(data: bytes | bytearray, name: str) -> object:
    """Parse JSON of a client; error messages begin with its `name`, such as "the body".

    Raises:
        RequestRefused: the data is not JSON, or not UTF-8.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
        if SURROGATE.search(data):
            # Half of a surrogate pair is valid JSON but not valid text.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise RequestRefused("invalid_utf8", f"{name} is not UTF-8 at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise RequestRefused("invalid_unicode", f"{name} has half of a surrogate pair (such as \\ud800)") from error
    except (ValueError, RecursionError) as error:
        raise RequestRefused("invalid_json", f"{name} is not JSON: {error}") from error
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def read_parameters(body: object) -> dict[str, Any]:
    """Return the parameters of a request; a null parameter counts as absent.

    Raises:
        RequestRefused: the body is not an object.
    """
    if not isinstance(body, dict):
        raise RequestRefused("invalid_request", "body must be an object", "body")
    parameters = {name: value for name, value in cast("dict[str, Any]", body).items() if value is not None}
    # vLLM's clients send -1 for "not set".
    if parameters.get("seed") == -1:
        del parameters["seed"]
    if parameters.get("top_k") == -1:
        parameters["top_k"] = 0
    return parameters


SAME = SAMPLING_NAMES - {"logit_bias", "logprobs", "structured", "echo", "embed", "classify", "dimensions"} | {
    "seed",
    "model",
    "metadata",
    "add_special_tokens",
    "priority",
}
"""Parameters passed on unchanged: OpenAI's, and those that open-source servers add."""

OF_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
"""Parameters of chats passed on unchanged."""

ROLES = ("user", "assistant", "system", "developer")
CHAT_ROLES = (*ROLES, "tool")

IGNORED = frozenset(
    {
        "user",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prediction",
        "stream",
        "stream_options",
        "messages",
        "prompt",
    }
)
"""Parameters that do not affect the output, or are read elsewhere."""

Harmless: TypeAlias = Mapping[str, Callable[[Any], bool]]
"""Parameters that are accepted only with a value that has no effect: a check of the value, by name."""

HARMLESS: Harmless = {
    "tools": lambda value: value == [],
    "functions": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "function_call": lambda value: value in ("none", "auto"),
    "parallel_tool_calls": lambda value: isinstance(value, bool),
    "modalities": lambda value: value == ["text"],
    "echo": lambda value: value is False,
    "suffix": lambda value: value == "",
    "best_of": lambda value: value == 1,
    "reasoning_effort": lambda value: value == "none",
    "verbosity": lambda value: value == "medium",
    "audio": lambda _: False,
    "moderation": lambda _: False,
    "web_search_options": lambda _: False,
}


def _options(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in body.items():
        if name in SAME or (endpoint == CHAT and name in OF_TOOLS):
            options[name] = value
        # `best_of` equal to `n` selects nothing.
        elif name == "echo" and endpoint == COMPLETIONS:
            continue
        elif name not in IGNORED | TRANSLATED and not (name == "best_of" and value == body.get("n", 1)):
            refuse_unless_harmless(name, value, HARMLESS, SAME | TRANSLATED | OF_TOOLS)
    options |= read_bias(body) | _logprobs(endpoint, body) | _echo(endpoint, body)
    if structured := read_structured(body)[0]:
        options["structured"] = structured
    _check_model(options)
    if "max_completion_tokens" in body:
        options["max_tokens"] = body["max_completion_tokens"]
    return options


def read_passed(
    parameters: Mapping[str, Any], passed: Collection[str], ignored: Collection[str], harmless: Harmless
) -> dict[str, Any]:
    """Return the parameters that a job has unchanged.

    Raises:
        RequestRefused: another one is not in `ignored` and would have an effect, or the model is not text.
    """
    for name, value in parameters.items():
        if name not in passed and name not in ignored:
            refuse_unless_harmless(name, value, harmless, {*passed, *ignored})
    options = {name: value for name, value in parameters.items() if name in passed}
    _check_model(options)
    return options


def _check_model(options: Mapping[str, Any]) -> None:
    if not is_short(options.get("model"), limits.MAX_MODEL_CHARS):
        message = f"model must be text of 1 to {limits.MAX_MODEL_CHARS} characters"
        raise RequestRefused("invalid_request", message, "model")


def prompt_name(endpoint: Endpoint) -> str:
    """Return the parameter that has the prompt."""
    return {CHAT: "messages", EMBEDDINGS: "input", RERANK: "documents"}.get(endpoint, "prompt")


def _names(endpoint: Endpoint, parameters: Mapping[str, Any]) -> Mapping[str, str]:
    names = {PROMPT: prompt_name(endpoint)}
    if "max_completion_tokens" in parameters:
        names["max_tokens"] = "max_completion_tokens"
    if "top_logprobs" in parameters:
        names["logprobs"] = "top_logprobs"
    if (name := read_structured(parameters)[1]) is not None:
        names["structured"] = name
    return names


def _stream(parameters: Mapping[str, Any]) -> tuple[bool, bool]:
    is_stream, extra = read_flag(parameters, "stream"), parameters.get("stream_options")
    if extra is not None and (not is_stream or not isinstance(extra, dict)):
        message = "stream_options must be an object, in a request with stream: true"
        raise RequestRefused("invalid_request", message, "stream_options")
    return is_stream, read_flag(cast("dict[str, Any]", extra or {}), "include_usage")


def read_flag(parameters: Mapping[str, Any], name: str, *, is_default: bool = False) -> bool:
    """Return a boolean parameter.

    Raises:
        RequestRefused: it is not a boolean.
    """
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestRefused("invalid_request", f"{name} must be true or false", name)
    return is_default if value is None else value


TRANSLATED = frozenset({"logit_bias", "logprobs", "top_logprobs", "max_completion_tokens", "structured", *READERS})
"""Parameters whose form in jobs differs."""


def refuse_unless_harmless(name: str, value: object, harmless: Harmless, served: Iterable[str]) -> None:
    """Check a parameter that is not served.

    Raises:
        RequestRefused: it is unknown, or its value would have an effect.
    """
    is_harmless = harmless.get(name)
    if is_harmless is None:
        hint = did_you_mean(name, {*served, *harmless})
        raise RequestRefused("unknown_parameter", f"unknown parameter {name!r}{hint}", name)
    if not is_harmless(value):
        raise RequestRefused("unsupported", f"{name} is not supported here as {json.dumps(value)[:80]}", name)


def read_bias(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the keys of a logit bias, which are strings in JSON, to token ids."""
    bias = body.get("logit_bias")
    if bias is None:
        return {}
    if not isinstance(bias, dict):
        raise RequestRefused("invalid_request", "logit_bias must map token ids to numbers", "logit_bias")
    pairs = cast("dict[str, Any]", bias)
    if len(pairs) > limits.MAX_LOGIT_BIAS:
        raise RequestRefused("invalid_request", f"logit_bias has at most {limits.MAX_LOGIT_BIAS} tokens", "logit_bias")
    if not all(token.isascii() and token.isdigit() and len(token) <= MAX_TOKEN_ID_DIGITS for token in pairs):
        raise RequestRefused("invalid_request", "logit_bias must map token ids to numbers", "logit_bias")
    return {"logit_bias": {int(token): value for token, value in pairs.items()}}


def _logprobs(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    if endpoint == COMPLETIONS:
        if top is not None:
            raise RequestRefused("unsupported", "top_logprobs is for chats: give logprobs a number", "top_logprobs")
        return {} if logprobs is None else {"logprobs": logprobs}
    if logprobs is not None and not isinstance(logprobs, bool):
        raise RequestRefused("invalid_request", "logprobs must be true or false in a chat", "logprobs")
    if top is not None and not logprobs:
        raise RequestRefused("invalid_request", "top_logprobs needs logprobs: true", "top_logprobs")
    return {"logprobs": 0 if top is None else top} if logprobs else {}


def _echo(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    if endpoint != COMPLETIONS or not read_flag(body, "echo"):
        return {}
    if read_flag(body, "stream"):
        raise RequestRefused("unsupported", "echo is not supported with stream: true", "echo")
    return {"echo": True}


def _chat_prompt(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("invalid_request", "messages must be a list with one message or more", "messages")
    check_number(cast("list[object]", messages), "messages")
    return [_chat_message(f"messages[{at}]", message) for at, message in enumerate(cast("list[object]", messages))]


def check_number(messages: Sequence[object], param: str) -> None:
    """Check the number of messages, before each is checked.

    Raises:
        RequestRefused: there are too many.
    """
    if len(messages) > limits.MAX_MESSAGES:
        raise RequestRefused(
            "invalid_request", f"a request has at most {limits.MAX_MESSAGES} messages, got {len(messages)}", param
        )


def _chat_message(at: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestRefused("invalid_request", "a message must be an object", at)
    fields = {name: value for name, value in cast("dict[str, Any]", message).items() if value not in (None, [])}
    if "reasoning" in fields:
        # Some servers name it so.
        fields.setdefault("reasoning_content", fields.pop("reasoning"))
    if unsupported := fields.keys() - MESSAGE_FIELDS:
        name = min(unsupported)
        raise RequestRefused("unsupported", f"{name} in a message is not supported here", f"{at}.{name}")
    if fields.get("role") == "function":
        raise RequestRefused("unsupported", "messages of role function are not supported here: use tool", f"{at}.role")
    check_role(fields.get("role"), f"{at}.role", CHAT_ROLES)
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(fields.get(name, ""), str):
            raise RequestRefused("invalid_request", f"a message's {name} must be text", f"{at}.{name}")
    content = (
        "" if "tool_calls" in fields and "content" not in fields else _content(fields.get("content"), f"{at}.content")
    )
    return {**fields, "content": content}


def check_role(role: object, param: str, roles: Sequence[str] = ROLES) -> None:
    """Check the role of a message.

    Raises:
        RequestRefused: it is missing, or not supported.
    """
    if role not in roles:
        got = "it is missing" if role is None else f"got {json.dumps(role)[:80]}"
        raise RequestRefused("invalid_request", f"a message's role must be one of {', '.join(roles)}; {got}", param)


def _content(content: object, param: str) -> str:
    try:
        text = joined_text(content)
    except InvalidJob as error:
        raise RequestRefused("unsupported", str(error), param) from error
    if not isinstance(text, str):
        raise RequestRefused("invalid_request", "a message's content must be text", param)
    return text


def _completion_prompt(body: Mapping[str, Any]) -> PromptLike:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(cast("list[object]", prompt)) > 1:
            message = "several prompts are not supported: give each a request, or a line, of its own"
            raise RequestRefused("unsupported", message, "prompt")
        [prompt] = cast("list[object]", prompt)
    is_list = isinstance(prompt, list) and all(type(item) is int for item in cast("list[object]", prompt)[:1])
    if not is_list and not isinstance(prompt, str):
        raise RequestRefused("invalid_request", "prompt must be text or a list of token ids", "prompt")
    return cast("PromptLike", prompt)  # the other items are checked with the job
