"""Format the results of a bulk file as OpenAI batch output; output lines and error lines have the same shape.

    {"id": …, "custom_id": …, "response": {"status_code", "request_id", "body"} | null, "error": {…} | null}

No I/O.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from sluice.producer.errors import (
    IdempotencyConflict,
    InvalidJob,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotDone,
    JobTooLarge,
    ProducerError,
)
from sluice.protocol.bulk_files.input import BadLine
from sluice.protocol.openai_format.bodies import (
    CALLERS_CODES,
    CODES_OF_PROMPT,
    CONTEXT_LENGTH_EXCEEDED,
    Object,
    chat_body,
    completion_body,
    openai_code,
)
from sluice.protocol.openai_format.embeddings import embedding_body
from sluice.protocol.openai_format.refusals import RequestRefused
from sluice.protocol.openai_format.requests import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    Endpoint,
    ManyPrompts,
    prompt_name,
)
from sluice.protocol.wire import JobResult

BODIES: Mapping[Endpoint, Callable[[str, JobResult, str], Object]] = {
    CHAT: chat_body,
    COMPLETIONS: completion_body,
    EMBEDDINGS: embedding_body,
    # One job of a request to rerank: the scores of its document.
    RERANK: embedding_body,
}
"""How the result of a line is formatted, by its endpoint."""


def output_line(name: str, custom_id: str, endpoint: Endpoint, result: JobResult, *, model: str | None) -> Object:
    """Format the line of a job that is done."""
    body = BODIES[endpoint](name, result, result.model or model or "")
    return _line(name, custom_id, response=_response(name, 200, body))


def line_of_many(
    name: str, custom_id: str, request: ManyPrompts, results: Sequence[JobResult], *, model: str | None
) -> tuple[Object, bool]:
    """Format the line of a request whose jobs are all done, and return whether it has an answer."""
    try:
        body = request.body(results, name, results[0].model or model or "")
    except RequestRefused as refused:
        return _refused(name, custom_id, refused.code, refused.message, refused.param), False
    return _line(name, custom_id, response=_response(name, 200, body)), True


def error_line(name: str, custom_id: str, error: ProducerError, endpoint: Endpoint) -> Object:
    """Format the line of a job that was refused at submit, failed, was cancelled or expired."""
    is_prompt = isinstance(error, JobTooLarge) or (isinstance(error, JobFailed) and error.code in CODES_OF_PROMPT)
    param = prompt_name(endpoint) if is_prompt else None
    match error:
        case JobExpired():
            code, message = "batch_expired", "This request could not be executed before it expired."
            return _line(name, custom_id, error={"code": code, "message": f"{message} {error.reason}"})
        case JobCancelled():
            return _line(name, custom_id, error={"code": "batch_cancelled", "message": f"Cancelled: {error.reason}"})
        case JobFailed() if not _is_the_callers(error):
            return _line(name, custom_id, error={"code": error.code or "failed", "message": error.reason})
        case JobNotDone():
            return _refused(name, custom_id, openai_code(error.code or "failed"), error.reason, param)
        case _:
            return _refused(name, custom_id, refused_code(error), str(error), param)


def refused_code(error: ProducerError) -> str:
    """Return the error code of a job that the queue did not accept, the same as in the gateway."""
    match error:
        case JobTooLarge():
            return CONTEXT_LENGTH_EXCEEDED
        case InvalidJob():
            return "invalid_request"
        case IdempotencyConflict():
            return "idempotency_conflict"
        case _:
            return "refused"


def bad_line(name: str, bad: BadLine) -> Object:
    """Format the line of an invalid input line, with its number."""
    line = _refused(name, bad.name, bad.code, f"line {bad.number}: {bad.message}", bad.param)
    # The name of the field in OpenAI's batch errors.
    line["response"]["body"]["error"]["line"] = bad.number
    return line


def encoded(line: Mapping[str, object]) -> str:
    """Encode a line as JSON with a newline."""
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"


def _is_the_callers(error: JobFailed) -> bool:
    return error.code in CALLERS_CODES


def _line(name: str, custom_id: str, *, response: Object | None = None, error: Object | None = None) -> Object:
    return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}


def _response(name: str, status_code: int, body: Object) -> Object:
    return {"status_code": status_code, "request_id": f"req_{name}", "body": body}


def _refused(name: str, custom_id: str, code: str, message: str, param: str | None) -> Object:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return _line(name, custom_id, response=_response(name, 400, {"error": error}))
