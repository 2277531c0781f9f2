"""Format results as the bodies of OpenAI's responses. No I/O."""

import time
from collections.abc import Sequence
from typing import Any

from sluice.protocol.openai_format.logprobs import chat_logprobs, completion_logprobs
from sluice.protocol.states import REJECTIONS
from sluice.protocol.wire import JobResult, Usage

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
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(result.choices)
    ]
    return _body(f"chatcmpl-{name}", "chat.completion", result, model, choices)


def completion_body(name: str, result: JobResult, model: str) -> Object:
    """Format the response to a text completion."""
    choices = [
        {
            "index": index,
            "text": choice.text,
            "logprobs": completion_logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(result.choices)
    ]
    return _body(f"cmpl-{name}", "text_completion", result, model, choices)


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
