"""Format results as the bodies of OpenAI's responses. No I/O."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sluice.protocol.openai_format.logprobs import chat_logprobs, completion_logprobs, token_choices
from sluice.protocol.openai_format.tools import TOOL_CALLS, finish_reason_of, message_object
from sluice.protocol.states import REJECTIONS
from sluice.protocol.wire import ChoiceResult, JobResult, PromptResult, Usage

Object = dict[str, Any]  # Any: JSON, here and below


CALLERS_CODES = REJECTIONS | {"invalid_request", "request_too_large", "model_mismatch"}
"""Error codes of a worker for an invalid request."""

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
TOO_LONG = ("prompt_too_long", "request_too_large")
"""Error codes of a worker that are `CONTEXT_LENGTH_EXCEEDED` in OpenAI's API."""

CODES_OF_PROMPT = REJECTIONS.union(TOO_LONG)
"""Error codes of a worker whose `param` is the prompt."""


def openai_code(code: str) -> str:
    """Return OpenAI's name of an error code, or the code itself if there is none."""
    return CONTEXT_LENGTH_EXCEEDED if code in TOO_LONG else code


def chat_body(name: str, result: JobResult, model: str) -> Object:
    """Format the response to a chat."""
    choices = [_chat_choice(name, index, choice) for index, choice in enumerate(result.choices)]
    return _body(f"chatcmpl-{name}", "chat.completion", result, model, choices)


def _chat_choice(name: str, index: int, choice: ChoiceResult) -> Object:
    message = message_object(name, index, choice)
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(choice.token_ids, choice.logprobs),
        "finish_reason": finish_reason_of(choice.finish_reason, has_calls=TOOL_CALLS in message),
        **_prompt_logprobs(choice),
    }


def completion_body(name: str, result: JobResult, model: str) -> Object:
    """Format the response to a text completion."""
    result = echoed(result)
    choices = [
        {
            "index": index,
            "text": choice.text,
            "logprobs": completion_logprobs(choice.token_ids, choice.logprobs, is_echoed=is_echoed(choice)),
            "finish_reason": choice.finish_reason,
            **_prompt_logprobs(choice),
        }
        for index, choice in enumerate(result.choices)
    ]
    return _body(f"cmpl-{name}", "text_completion", result, model, choices)


def echoed(result: JobResult) -> JobResult:
    """Return a result whose texts begin with the prompt, if its job asked for that. Repeating it changes nothing."""
    prompt = result.prompt
    if prompt is None or not prompt.is_echoed:
        return result
    return replace(result, choices=tuple(_echoed(choice, prompt) for choice in result.choices))


def is_echoed(choice: ChoiceResult) -> bool:
    """Return whether a choice of `echoed` begins with the prompt."""
    return choice.prompt is not None and choice.prompt.is_echoed


def _echoed(choice: ChoiceResult, prompt: PromptResult) -> ChoiceResult:
    num_chars, logprobs = len(prompt.text), choice.logprobs
    # Without tokens there are no log-probabilities, although they were asked for.
    if prompt.logprobs is not None and (logprobs is not None or not choice.token_ids):
        own = [at if at.offset is None else replace(at, offset=at.offset + num_chars) for at in logprobs or ()]
        logprobs = (*prompt.logprobs, *own)
    return replace(
        choice,
        text=prompt.text + choice.text,
        token_ids=prompt.token_ids + choice.token_ids,
        logprobs=logprobs,
        prompt=replace(prompt, text="", token_ids=(), logprobs=None),
    )


def _prompt_logprobs(choice: ChoiceResult) -> Object:
    """Format the log-probabilities of a prompt as vLLM does, if there are any that are not echoed."""
    prompt = choice.prompt
    if prompt is None or prompt.is_echoed:
        return {}
    pairs = zip(prompt.token_ids, prompt.logprobs or (), strict=False)
    return {"prompt_logprobs": [None if place == 0 else token_choices(*pair) for place, pair in enumerate(pairs)]}


def _body(name: str, kind: str, result: JobResult, model: str, choices: Sequence[Object]) -> Object:
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": list(choices),
        "usage": usage_object(result.usage),
    }


def usage_object(usage: Usage) -> Object:
    """Format the token counts of a job."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
