"""Errors as OpenAI's clients read them: an HTTP status, and an object with `message`, `type`, `param` and `code`."""

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from math import ceil

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from sluice.gateway.faults import FileOfOpenBatch, StorageUnavailable, TablesMissing
from sluice.producer.errors import (
    BadOffset,
    BatchClosed,
    BatchNotFound,
    ChainNotFound,
    ChannelExpired,
    EmbeddedServerError,
    HistoryUnavailable,
    IdempotencyConflict,
    InvalidJob,
    InvalidSetting,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotDone,
    JobNotFound,
    JobTooLarge,
    LessDurable,
    ProducerError,
    QueueFull,
    QueueRefused,
    QueueUnreachable,
    ResultExpired,
    ResultTimeout,
    ScheduleNotFound,
    TooManySchedules,
)
from sluice.protocol.errors import Copyable
from sluice.protocol.openai_format.bodies import (
    CALLERS_CODES,
    CODES_OF_PROMPT,
    CONTEXT_LENGTH_EXCEEDED,
    Object,
    openai_code,
)
from sluice.protocol.openai_format.requests import PROMPT, RequestRefused, refusal

CALLER, SERVER, LIMIT = "invalid_request_error", "server_error", "rate_limit_error"

KINDS: dict[type, tuple[int, str, str | None]] = {
    JobTooLarge: (400, CALLER, CONTEXT_LENGTH_EXCEEDED),
    InvalidJob: (400, CALLER, "invalid_request"),
    IdempotencyConflict: (422, CALLER, "idempotency_conflict"),
    QueueFull: (429, LIMIT, None),
    QueueRefused: (503, SERVER, "queue_refuses"),
    InvalidSetting: (503, SERVER, "gateway_misconfigured"),
    BatchClosed: (409, CALLER, "batch_closed"),
    TooManySchedules: (409, CALLER, "too_many_schedules"),
    HistoryUnavailable: (503, SERVER, "database_unavailable"),
    TablesMissing: (503, SERVER, "history_missing"),
    StorageUnavailable: (503, SERVER, "storage_unavailable"),
    FileOfOpenBatch: (409, CALLER, "file_in_use"),
    QueueUnreachable: (503, SERVER, "queue_unreachable"),
    EmbeddedServerError: (503, SERVER, "queue_unreachable"),
    LessDurable: (503, SERVER, "less_durable"),
    JobFailed: (500, SERVER, None),
    JobExpired: (504, SERVER, "timeout"),
    ResultTimeout: (504, SERVER, "timeout"),
    JobCancelled: (409, CALLER, "cancelled"),
    JobNotFound: (404, CALLER, "job_not_found"),
    BatchNotFound: (404, CALLER, "batch_not_found"),
    ChainNotFound: (404, CALLER, "chain_not_found"),
    ScheduleNotFound: (404, CALLER, "schedule_not_found"),
    BadOffset: (400, CALLER, "bad_position"),
    ResultExpired: (410, CALLER, "result_expired"),
    ChannelExpired: (410, CALLER, "output_expired"),
    ProducerError: (500, SERVER, None),
}
"""Status, type and code of the client's errors; the nearest base class counts."""

PRIVATE: dict[type, str | None] = {
    **dict.fromkeys((BatchClosed, TooManySchedules)),
    QueueRefused: "the queue's server refuses the request; the gateway's log has the cause",
    **dict.fromkeys((QueueUnreachable, EmbeddedServerError), "the queue's server does not answer now; try again"),
    ResultTimeout: "there was no answer in time; try again",
    InvalidSetting: "a setting of the gateway does not match its queue; the gateway's log has the cause",
    HistoryUnavailable: "the database does not answer now; try again",
    TablesMissing: "the gateway's database lacks the tables of this release, or does not exist: run `worker migrate`",
    StorageUnavailable: "the storage of files does not answer now; try again",
}
"""Messages that clients read instead of an error's text, which may contain server addresses; None: the text itself."""

LOG = logging.getLogger(__name__)

METHOD_NOT_ALLOWED = 405
CLIENT_LEFT_STATUS = 499
"""In the log, of a request whose client has left."""

UNREACHABLE_RETRY_S = 1.0
MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 1000, 100


class HttpError(Copyable):
    """A request that is answered with an error.

    Args:
        kind: OpenAI's `type`.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # A message may quote the request.
        message, param = message[:MAX_MESSAGE_CHARS], None if param is None else param[:MAX_PARAM_CHARS]
        super().__init__(message)
        self.status, self.kind, self.message, self.code, self.param = status, kind, message, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> Object:
        """The JSON object of the error; a stream sends it as its last event."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def bad_request(
    message: str, *, code: str = "invalid_request", param: str | None = None, status: int = 400
) -> HttpError:
    """Return the error of a request that must not be retried unchanged."""
    return HttpError(status, CALLER, message, code, param=param)


NO_NAMES: Mapping[str, str] = {}


def error_of(error: ProducerError | RequestRefused | HTTPException, names: Mapping[str, str] = NO_NAMES) -> HttpError:
    """Return the HTTP error for an error of the queue's client, of a request's validation or of the router.

    Args:
        error: The error.
        names: The API's names of the prompt and of renamed options, by ours.
    """
    if isinstance(error, RequestRefused):
        return bad_request(error.message, code=error.code, param=error.param)
    if isinstance(error, HTTPException):
        code = "method_not_allowed" if error.status_code == METHOD_NOT_ALLOWED else "not_found"
        return bad_request(error.detail, code=code, status=error.status_code)
    if isinstance(error, JobFailed) and error.code is not None and error.code in CALLERS_CODES:
        param = names.get(PROMPT) if error.code in CODES_OF_PROMPT else None
        return bad_request(error.reason, code=openai_code(error.code), param=param)
    status, kind, code = next(KINDS[base] for base in type(error).__mro__ if base in KINDS)
    is_late = isinstance(error, JobExpired)
    message = f"job {error.job_id} has not ended within the time limit of its request" if is_late else str(error)
    if (public := next((PRIVATE[base] for base in type(error).__mro__ if base in PRIVATE), None)) is not None:
        LOG.warning("A request failed: %s", error)
        message = public
    param = None
    if isinstance(error, JobTooLarge):
        param = names.get(PROMPT)
    elif isinstance(error, InvalidJob):
        refused = refusal(error, names)
        message, param = refused.message, refused.param
    headers = _when_to_retry(error)
    return HttpError(status, kind, message, _code_of(error) or code, param=param, headers=headers)


@contextmanager
def named(names: Mapping[str, str]) -> Generator[None]:
    """Raise errors of the body with the API's names of the parameters."""
    try:
        yield
    except (InvalidJob, JobFailed) as error:
        raise error_of(error, names) from error
    except HttpError as error:
        error.param = error.param and names.get(error.param, error.param)
        raise


def _code_of(error: ProducerError) -> str | None:
    if isinstance(error, QueueFull):
        return error.reason
    # At its deadline a job is ended by its worker, without a code, or by the queue, with this one.
    return error.code if isinstance(error, JobNotDone) and error.code != "deadline" else None


def _when_to_retry(error: ProducerError) -> dict[str, str]:
    if isinstance(error, QueueFull):
        return {"retry-after": str(ceil(error.retry_after_s)), **_room(error)}
    is_away = isinstance(error, (QueueUnreachable, EmbeddedServerError, HistoryUnavailable, StorageUnavailable))
    needs_operator = isinstance(error, TablesMissing)
    return {"retry-after": str(ceil(UNREACHABLE_RETRY_S))} if is_away and not needs_operator else {}


def _room(error: QueueFull) -> dict[str, str]:
    """Return the room of a full queue in the rate limit headers of OpenAI's API."""
    waiting = {"full_jobs": ("requests", error.waiting_jobs), "full_tokens": ("tokens", error.waiting_tokens)}
    if error.reason not in waiting:
        return {}
    name, num_waiting = waiting[error.reason]
    return {
        f"x-ratelimit-limit-{name}": str(error.bound),
        f"x-ratelimit-remaining-{name}": str(max(0, error.bound - num_waiting)),
        f"x-ratelimit-reset-{name}": f"{ceil(error.retry_after_s)}s",
    }
