"""Format results as the bodies of OpenAI's responses. No I/O."""

import time
from collections.abc import Sequence
from typing import Any

from sluice.producer.contract.wire import JobResult, TokenLogprobs, Usage

Object = dict[str, Any]  # Any: JSON, here and below


CALLERS_CODES = frozenset(
    {"invalid_request", "prompt_too_long", "prompt_empty", "unknown_token", "request_too_large", "model_mismatch"}
)
"""Error codes of a worker for an invalid request."""


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


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> Object | None:
    """Format log-probabilities of a chat. Tokens are named by id, because the tokenizer is not available here."""
    if logprobs is None:
        return None
    content = [
        {**_token(token, at.chosen), "top_logprobs": [_token(other, logprob) for other, logprob in at.top]}
        for token, at in zip(token_ids, logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


def _token(token: int, logprob: float) -> Object:
    return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}


def completion_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> Object | None:
    """Format log-probabilities of a text completion, as `chat_logprobs` does."""
    if logprobs is None:
        return None
    return {
        "tokens": [f"token_id:{token}" for token in token_ids],
        "token_logprobs": [at.chosen for at in logprobs],
        "top_logprobs": [{f"token_id:{token}": logprob for token, logprob in at.top} for at in logprobs],
        "text_offset": None,
    }
