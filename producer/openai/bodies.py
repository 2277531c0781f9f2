"""Format results as the bodies of OpenAI's responses. No I/O."""

import time
from collections.abc import Sequence
from typing import Any

from sluice.producer.contract.wire import ChoiceResult, JobResult, TokenLogprobs

Object = dict[str, Any]  # Any: JSON, here and below


def usage(result: JobResult) -> Object:
    usage = result.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _body(name: str, kind: str, result: JobResult, model: str, choices: Sequence[Object]) -> Object:
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": list(choices),
        "usage": usage(result),
    }


def chat_body(name: str, result: JobResult, model: str) -> Object:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(choice),
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(result.choices)
    ]
    return _body(f"chatcmpl-{name}", "chat.completion", result, model, choices)


def completion_body(name: str, result: JobResult, model: str) -> Object:
    choices = [
        {
            "index": index,
            "text": choice.text,
            "logprobs": _completion_logprobs(choice),
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(result.choices)
    ]
    return _body(f"cmpl-{name}", "text_completion", result, model, choices)


def _chat_logprobs(choice: ChoiceResult) -> Object | None:
    """Format log-probabilities. Tokens are named by id, because the tokenizer is not available here."""
    if choice.logprobs is None:
        return None
    content = [
        {**_token(token, at.chosen), "top_logprobs": [_token(other, logprob) for other, logprob in at.top]}
        for token, at in zip(choice.token_ids, choice.logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


def _token(token: int, logprob: float) -> Object:
    return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}


def _completion_logprobs(choice: ChoiceResult) -> Object | None:
    if choice.logprobs is None:
        return None
    return {
        "tokens": [f"token_id:{token}" for token in choice.token_ids],
        "token_logprobs": [at.chosen for at in choice.logprobs],
        "top_logprobs": [_top(at) for at in choice.logprobs],
        "text_offset": None,
    }


def _top(at: TokenLogprobs) -> Object:
    return {f"token_id:{token}": logprob for token, logprob in at.top}
