"""Submit jobs with any option of the queue."""

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, cast, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway.access import Caller, caller_of
from sluice.gateway.errors import bad_request, named
from sluice.gateway.native.bodies import SUBMITTED, receipt_body
from sluice.gateway.native.search import QUEUE, queue_named
from sluice.gateway.openapi.messages import message_schema
from sluice.gateway.openapi.options import KEY, TOKEN_ID, options_schema
from sluice.gateway.openapi.routes import JSON, json_answer, route
from sluice.gateway.openapi.schemas import TEXT, Schema, list_of, object_schema, schema_of
from sluice.gateway.ownership import own_batch
from sluice.gateway.queues import Queues
from sluice.gateway.rates import KeyRates, callers_job
from sluice.gateway.requests import read_json, traceparent_of
from sluice.gateway.settings import GatewaySettings
from sluice.protocol.chains.chain import MAX_AFTER, After, OnFailure, When
from sluice.protocol.errors import InvalidJob, did_you_mean
from sluice.protocol.jobs import OPTION_NAMES, PROMPTS, Job, Moment, Options, only_prompt
from sluice.protocol.messages import JobId, Role
from sluice.protocol.openai_format.requests import PROMPT, RequestRefused, read_bias

WAITING = ("after", "when", "on_failure")
"""Fields that say what the job waits for."""

MOMENTS = ("deadline", "not_before")
MAX_MOMENT_S = 10**9
ALLOWED = OPTION_NAMES - {"tenant"}
MESSAGE = message_schema("Message", get_args(Role))
BODY: Schema = {
    **object_schema(
        "NewJob",
        optional=("prompt", "messages", "token_ids", *WAITING, *ALLOWED),
        prompt={**TEXT, "minLength": 1},
        messages={**list_of(MESSAGE), "minItems": 1},
        token_ids={**list_of(TOKEN_ID), "minItems": 1},
        after={
            **list_of(TEXT),
            "minItems": 1,
            "maxItems": MAX_AFTER,
            "description": "Jobs of the queue that must end first. `{{outputs[0]}}` in the prompt is the first's text.",
        },
        when={**schema_of(When), "default": "all", "description": "Whether all of them must end, or any one."},
        on_failure={
            **schema_of(OnFailure),
            "default": "cancel",
            "description": "`cancel`: only jobs that are done count; a failure cancels. `release`: every end counts.",
        },
        **options_schema(ALLOWED),
    ),
    "oneOf": [{"required": [name]} for name in PROMPTS],
    "additionalProperties": False,
}


class SubmitRoute:
    """The route that submits jobs. They continue if their client leaves."""

    def __init__(self, queues: Queues, rates: KeyRates, settings: GatewaySettings) -> None:
        self._queues, self._rates, self._max_bytes = queues, rates, settings.max_body_bytes

    @route(
        "POST /jobs",
        {
            201: json_answer("The queue has the job.", SUBMITTED),
            200: json_answer("The queue already had the job.", SUBMITTED),
        },
        tag="jobs",
        scope="submit",
        errors=(404, 409, 422),
        parameters=(QUEUE, KEY),
        body={JSON: BODY},
    )
    async def submit(self, request: Request) -> Response:
        """Submit a job.

        Raises:
            HttpError, RequestRefused, ProducerError: the request is refused.
        """
        body = await read_json(request, self._max_bytes)
        caller = caller_of(request)
        body, after = _without_waiting(body)
        job_request = read_job(body, caller, KEY.read(request))
        name, model = QUEUE.read(request), job_request.options.get("model")
        queue = await self._queues.of_model(model) if name is None else queue_named(self._queues, name)
        with named({PROMPT: prompt_name(cast("dict[str, object]", body))}):
            job = callers_job(
                caller, job_request.prompt, {"traceparent": traceparent_of(request), **job_request.options}
            )
            receipt, rates = await self._rates.submit(queue, caller, job, after)
        request.state.job_id = receipt.id
        return JSONResponse(
            receipt_body(receipt, queue.name),
            200 if receipt.is_duplicate else 201,
            headers={**rates, "location": f"/jobs/{receipt.id}"},
        )


def _without_waiting(body: object) -> tuple[object, After | None]:
    """Return a request's body without the fields that say what the job waits for, and what that is.

    Raises:
        HttpError: one of them is wrong.
    """
    if not isinstance(body, dict):
        return body, None
    fields = cast("dict[str, Any]", body)
    stated = {name: value for name in WAITING if (value := fields.get(name)) is not None}
    rest = {name: value for name, value in fields.items() if name not in WAITING}
    if not stated:
        return rest, None
    after = stated.get("after")
    if not isinstance(after, list) or not all(isinstance(job_id, str) for job_id in cast("list[object]", after)):
        raise bad_request("after must be a list of jobs' ids", param="after")
    try:
        ids = tuple(map(JobId, cast("list[str]", after)))
        return rest, After(ids, stated.get("when", "all"), stated.get("on_failure", "cancel"))
    except InvalidJob as error:
        raise bad_request(str(error), param="after") from error


def read_job(body: object, caller: Caller, idempotency_key: str | None = None) -> Job:
    """Return the job of a request's body; the queue's client checks the values of its options.

    Raises:
        HttpError, RequestRefused: a field is unknown, a time is not valid, or there is not exactly one prompt.
    """
    if not isinstance(body, dict):
        raise bad_request("the body must be an object", param="body")
    # A null field counts as absent.
    fields = {name: value for name, value in cast("dict[str, Any]", body).items() if value is not None}
    for name in fields:
        _check_name(name)
    options: dict[str, Any] = {name: value for name, value in fields.items() if name not in PROMPTS}
    options["tenant"] = caller.tenant
    if isinstance(name := options.get("batch"), str) and name:
        options["batch"] = own_batch(caller, name)
    options |= read_bias(fields) | {name: _moment(name, fields[name]) for name in MOMENTS if name in fields}
    if idempotency_key is not None:
        if fields.get("idempotency_key", idempotency_key) != idempotency_key:
            raise bad_request("header and body have different idempotency keys", param="idempotency_key")
        options["idempotency_key"] = idempotency_key
    try:
        prompt = only_prompt(*(fields.get(name) for name in PROMPTS))
    except InvalidJob as error:
        raise RequestRefused("invalid_request", str(error), PROMPT) from error
    return Job(prompt, cast("Options", options))


def prompt_name(body: Mapping[str, object]) -> str:
    """Return the name of the field that has the prompt of a valid request."""
    return next(name for name in PROMPTS if body.get(name) is not None)


def _check_name(name: str) -> None:
    if name == "tenant":
        raise RequestRefused("unknown_parameter", "the tenant is set by the API key", name)
    if name not in ALLOWED and name not in PROMPTS:
        hint = did_you_mean(name, {*ALLOWED, *PROMPTS})
        raise RequestRefused("unknown_parameter", f"unknown parameter {name!r:.80}{hint}", name[:80])


def _moment(name: str, value: object) -> Moment:
    """Parse a time: seconds from now, or ISO 8601 with a time zone."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value) and 0 <= value <= MAX_MOMENT_S:
            return timedelta(seconds=value)
    elif isinstance(value, str) and len(value) <= 64:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError as error:
            raise _no_moment(name) from error
        if moment.tzinfo is not None:
            return moment
    raise _no_moment(name)


def _no_moment(name: str) -> RequestRefused:
    return RequestRefused(
        "invalid_request",
        f"{name} must be a number of seconds from now, up to {MAX_MOMENT_S}, or a time such as 2030-01-31T12:00:00Z",
        name,
    )
