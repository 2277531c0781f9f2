"""Read the body of a request in OpenAI's format. No I/O. `Any` stands for JSON here."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

from sluice.producer.contract import limits
from sluice.producer.contract.errors import InvalidJob, did_you_mean
from sluice.producer.contract.jobs import SAMPLING_NAMES, PromptLike, joined_text

MAX_TOKEN_ID_DIGITS = 10

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"
ENDPOINTS: tuple[Endpoint, ...] = (CHAT, COMPLETIONS)


class RequestRefused(Exception):
    """A request is not a valid job."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        """A constant word: invalid_request, unsupported, unknown_parameter …"""

        self.message, self.param = message, param


def read_request(endpoint: Endpoint, body: object) -> tuple[PromptLike, dict[str, Any]]:
    """Return the prompt and the options of a request; `stream` is left to the caller.

    Raises:
        RequestRefused: a parameter is unknown, not supported or of the wrong type.
    """
    given = read_parameters(body)
    prompt = _chat_prompt(given) if endpoint == CHAT else _completion_prompt(given)
    return prompt, _options(endpoint, given)


def read_parameters(body: object) -> dict[str, Any]:
    """Return the parameters of a request. One that is null counts as absent.

    Raises:
        RequestRefused: the body is no object.
    """
    if not isinstance(body, dict):
        raise RequestRefused("invalid_request", "body must be an object", "body")
    given = {name: value for name, value in cast("dict[str, Any]", body).items() if value is not None}
    # -1 is none to vLLM's clients.
    if given.get("seed") == -1:
        del given["seed"]
    if given.get("top_k") == -1:
        given["top_k"] = 0
    return given


SAME = SAMPLING_NAMES - {"logit_bias", "logprobs"} | {"seed", "model", "metadata", "add_special_tokens", "priority"}
"""Parameters passed on unchanged: OpenAI's and those that open servers add."""

ROLES = ("user", "assistant", "system", "developer")

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
"""Known parameters that are accepted only with the value that changes nothing, if there is one."""

HARMLESS: Harmless = {
    "tools": lambda value: value == [],
    "functions": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "function_call": lambda value: value in ("none", "auto"),
    "parallel_tool_calls": lambda value: isinstance(value, bool),
    "response_format": lambda value: value == {"type": "text"},
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
        if name in SAME:
            options[name] = value
        # `best_of` equal to `n` selects nothing.
        elif name not in IGNORED | TRANSLATED and not (name == "best_of" and value == body.get("n", 1)):
            refuse_unless_harmless(name, value, HARMLESS, SAME | TRANSLATED)
    options |= read_bias(body) | _logprobs(endpoint, body)
    if "max_completion_tokens" in body:
        options["max_tokens"] = body["max_completion_tokens"]
    return options


TRANSLATED = frozenset({"logit_bias", "logprobs", "top_logprobs", "max_completion_tokens"})
"""Parameters that jobs have in another form."""


def refuse_unless_harmless(name: str, value: object, harmless: Harmless, served: Iterable[str]) -> None:
    """Check a parameter that is not served.

    Raises:
        RequestRefused: it is unknown, or its value would change something.
    """
    is_harmless = harmless.get(name)
    if is_harmless is None:
        hint = did_you_mean(name, {*served, *harmless})
        raise RequestRefused("unknown_parameter", f"unknown parameter {name!r}{hint}", name)
    if not is_harmless(value):
        raise RequestRefused("unsupported", f"{name} is not supported here as {json.dumps(value)[:80]}", name)


def read_bias(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the keys of a logit bias, which JSON has as strings, to token ids."""
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
    asked, top = body.get("logprobs"), body.get("top_logprobs")
    if endpoint == COMPLETIONS:
        if top is not None:
            raise RequestRefused("unsupported", "top_logprobs is for chats: give logprobs a number", "top_logprobs")
        return {} if asked is None else {"logprobs": asked}
    if asked is not None and not isinstance(asked, bool):
        raise RequestRefused("invalid_request", "logprobs must be true or false in a chat", "logprobs")
    if top is not None and not asked:
        raise RequestRefused("invalid_request", "top_logprobs needs logprobs: true", "top_logprobs")
    return {"logprobs": top or 0} if asked else {}


def _chat_prompt(body: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("invalid_request", "messages must be a list with one message or more", "messages")
    check_number(cast("list[object]", messages), "messages")
    return [_chat_message(message) for message in cast("list[object]", messages)]


def check_number(messages: Sequence[object], param: str) -> None:
    """Check how many messages there are, before each is checked.

    Raises:
        RequestRefused: there are too many.
    """
    if len(messages) > limits.MAX_MESSAGES:
        raise RequestRefused(
            "invalid_request", f"at most {limits.MAX_MESSAGES} messages are taken, got {len(messages)}", param
        )


def _chat_message(message: object) -> dict[str, str]:
    if not isinstance(message, dict):
        raise RequestRefused("invalid_request", "a message must be an object", "messages")
    given = {name: value for name, value in cast("dict[str, Any]", message).items() if value not in (None, [])}
    if unsupported := given.keys() - {"role", "content", "name"}:
        raise RequestRefused("unsupported", f"{min(unsupported)} in a message is not supported here", "messages")
    if given.get("role") in ("tool", "function"):
        raise RequestRefused("unsupported", f"messages of role {given['role']} are not supported here", "messages")
    check_role(given.get("role"), "messages")
    return {**given, "content": _content(given.get("content"))}


def check_role(role: object, param: str) -> None:
    """Check the role of a message.

    Raises:
        RequestRefused: it is missing, or not one that is served.
    """
    if role not in ROLES:
        got = "it is missing" if role is None else f"got {json.dumps(role)[:80]}"
        raise RequestRefused("invalid_request", f"a message's role must be one of {', '.join(ROLES)}; {got}", param)


def _content(content: object) -> str:
    try:
        text = joined_text(content)
    except InvalidJob as error:
        raise RequestRefused("unsupported", str(error), "messages") from error
    if not isinstance(text, str):
        raise RequestRefused("invalid_request", "a message's content must be text", "messages")
    return text


def _completion_prompt(body: Mapping[str, Any]) -> PromptLike:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        items = cast("list[object]", prompt)
        if items and isinstance(items[0], (str, list)):
            if len(items) > 1:
                message = "several prompts are not supported: give each a request, or a line, of its own"
                raise RequestRefused("unsupported", message, "prompt")
            return _completion_prompt({"prompt": items[0]})
        return cast("list[int]", items)
    if not isinstance(prompt, str):
        raise RequestRefused("invalid_request", "prompt must be text or a list of token ids", "prompt")
    return prompt
