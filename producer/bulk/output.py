"""Format the results of a bulk file as OpenAI batch output: output lines and error lines have one shape.

    {"id": …, "custom_id": …, "response": {"status_code", "request_id", "body"} | null, "error": {…} | null}

No I/O.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.producer.contract.bulk.input import CHAT, BadLine, Endpoint
from sluice.producer.contract.wire import ChoiceResult, JobResult, TokenLogprobs
from sluice.producer.errors import JobCancelled, JobExpired, JobFailed, JobNotDone, ProducerError

Object = dict[str, Any]  # Any: JSON, here and below


def output_line(name: str, custom_id: str, endpoint: Endpoint, result: JobResult, *, model: str | None) -> Object:
    """Format the line of a job that is done."""
    body = _chat_body if endpoint == CHAT else _completion_body
    return _line(name, custom_id, response=_response(name, 200, body(name, result, result.model or model or "")))


def error_line(name: str, custom_id: str, error: ProducerError) -> Object:
    """Format the line of a job that was refused at submit, failed, was cancelled or expired."""
    match error:
        case JobExpired():
            code, message = "batch_expired", "This request could not be executed before it expired."
            return _line(name, custom_id, error={"code": code, "message": f"{message} {error.reason}"})
        case JobCancelled():
            return _line(name, custom_id, error={"code": "batch_cancelled", "message": f"Cancelled: {error.reason}"})
        case JobFailed() if not _is_the_callers(error):
            return _line(name, custom_id, error={"code": error.code or "failed", "message": error.reason})
        case JobNotDone():
            return _refused(name, custom_id, error.code or "failed", error.reason, None)
        case _:
            return _refused(name, custom_id, "invalid_request", str(error), None)


def bad_line(name: str, bad: BadLine) -> Object:
    """Format the line of an invalid input line. It has the line number, since there may be no custom id."""
    line = _refused(name, bad.custom_id, bad.code, f"line {bad.number}: {bad.message}", bad.param)
    # The field in which OpenAI's batch errors have it.
    line["response"]["body"]["error"]["line"] = bad.number
    return line


def bad_line_in(line: Object) -> tuple[int, str] | None:
    """Return number and message of an invalid input line, from what `bad_line` formatted; None for another line."""
    try:
        error = line["response"]["body"]["error"]
        return error["line"], error["message"].removeprefix(f"line {error['line']}: ")
    except (KeyError, TypeError, AttributeError):
        return None


def encoded(line: Mapping[str, object]) -> str:
    """Encode a line as JSON with a newline."""
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"


CALLERS_CODES = frozenset(
    {"invalid_request", "prompt_too_long", "prompt_empty", "unknown_token", "request_too_large", "model_mismatch"}
)
"""Error codes of a worker for an invalid request."""


def _is_the_callers(error: JobFailed) -> bool:
    return error.code in CALLERS_CODES


def _line(name: str, custom_id: str | None, *, response: Object | None = None, error: Object | None = None) -> Object:
    return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}


def _response(name: str, status_code: int, body: Object) -> Object:
    return {"status_code": status_code, "request_id": f"req_{name}", "body": body}


def _refused(name: str, custom_id: str | None, code: str, message: str, param: str | None) -> Object:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return _line(name, custom_id, response=_response(name, 400, {"error": error}))


def _usage(result: JobResult) -> Object:
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
        "usage": _usage(result),
    }


def _chat_body(name: str, result: JobResult, model: str) -> Object:
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


def _completion_body(name: str, result: JobResult, model: str) -> Object:
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
