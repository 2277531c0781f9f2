"""Add, list, pause, resume and remove the schedules of a caller's tenant."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway.access import Caller, caller_of
from sluice.gateway.arrival.shares import share_of
from sluice.gateway.errors import bad_request, named
from sluice.gateway.native.search import QUEUE, asked_queues, queue_named
from sluice.gateway.native.submit import BODY, WAITING, prompt_name, read_job
from sluice.gateway.openapi.routes import JSON, json_answer, route, text, whole_number
from sluice.gateway.openapi.schemas import TEXT, Schema, list_of, object_schema, or_null, schema_of
from sluice.gateway.queues import QueueClients, Queues
from sluice.gateway.rates import callers_job
from sluice.gateway.requests import read_json
from sluice.gateway.schedules import MAX_LISTED, Change, ScheduleChanges, on_thread, page_of_schedules
from sluice.gateway.settings import GatewaySettings
from sluice.producer.errors import ScheduleNotFound
from sluice.producer.operations import schedules
from sluice.producer.operations.schedules import NUM_NEXT, KeptSchedule, ScheduleView
from sluice.protocol.jobs import CheckedJob
from sluice.protocol.openai_format.requests import PROMPT, RequestRefused
from sluice.protocol.schedules.schedule import MAX_JOBS, Misfire, Overlap, Schedule

OF_ONE_JOB = ("job_id", "idempotency_key", *WAITING)
"""Fields of a job that a scheduled one does not have."""

JOB: Schema = {
    **BODY,
    "title": "ScheduledJob",
    "properties": {name: schema for name, schema in BODY["properties"].items() if name not in OF_ONE_JOB},
}
OPTIONAL = {"zone": TEXT, "misfire": schema_of(Misfire), "overlap": schema_of(Overlap)}
NEW: Schema = {
    **object_schema(
        "NewSchedule",
        optional=tuple(OPTIONAL),
        name=TEXT,
        cron=TEXT,
        jobs={**list_of(JOB), "minItems": 1, "maxItems": MAX_JOBS},
        **OPTIONAL,
    ),
    "additionalProperties": False,
}
SHOWN = [field.name for field in fields(ScheduleView) if field.name != "tenant"]
VIEW = schema_of(ScheduleView)
SCHEDULE = object_schema("Schedule", queue=TEXT, **{name: VIEW["properties"][name] for name in SHOWN})
SCHEDULES = object_schema("Schedules", data=list_of(SCHEDULE), next=or_null(TEXT))
LIMIT = whole_number("limit", "Maximum number of schedules on a page.", default=MAX_LISTED, least=1, most=MAX_LISTED)
AFTER = text("after", "The `next` of the previous page.")


class ScheduleRoutes:
    """The routes of schedules."""

    def __init__(self, queues: Queues, changes: ScheduleChanges, settings: GatewaySettings) -> None:
        self._queues, self._changes, self._max_bytes = queues, changes, settings.max_body_bytes

    @route(
        "POST /schedules",
        {201: json_answer("The queue has the schedule.", SCHEDULE)},
        tag="schedules",
        scope="submit",
        errors=(404, 409),
        parameters=(QUEUE,),
        body={JSON: NEW},
    )
    async def add(self, request: Request) -> Response:
        """Add a schedule, or replace the one of its name. It counts as a request of the key.

        Its runs do not, but one run of each schedule of the tenant must be within the limits of the key.

        Raises:
            HttpError, RequestRefused, ProducerError: the request is refused, or cannot be recorded.
        """
        share_of(request).charge(0)  # for keys without limits: a replaced schedule adds to no other count
        body = _fields(await read_json(request, self._max_bytes))
        caller = caller_of(request)
        jobs = _jobs(body.pop("jobs", None), caller)
        name = QUEUE.read(request)
        queue = self._queues.first if name is None else queue_named(self._queues, name)
        schedule = await on_thread(Schedule, tenant=caller.tenant, **body)
        kept, rates = await self._changes.add(caller, queue, schedule, jobs)
        return await _answer(queue, kept, 201, {**rates, "location": f"/schedules/{kept.name}"})

    @route(
        "GET /schedules",
        json_answer("One page, by queue and name.", SCHEDULES),
        tag="schedules",
        scope="read",
        errors=(404,),
        parameters=(QUEUE, LIMIT, AFTER),
    )
    async def list_schedules(self, request: Request) -> Response:
        """List the tenant's schedules, each with its last run and its next ones.

        Raises:
            HttpError: 404, the gateway does not serve this queue.
            QueueUnreachable: the server does not answer.
        """
        page, following = await page_of_schedules(
            asked_queues(self._queues, request),
            caller_of(request).tenant,
            num_next=NUM_NEXT,
            limit=LIMIT.read(request),
            after=AFTER.read(request) or "",
        )
        return JSONResponse({"data": [_shown(queue, view) for queue, view in page], "next": following})

    @route(
        "GET /schedules/{name}",
        json_answer("The schedule.", SCHEDULE),
        tag="schedules",
        scope="read",
        parameters=(QUEUE,),
    )
    async def show(self, request: Request) -> Response:
        """Show a schedule, with its last run and its next ones.

        Raises:
            ScheduleNotFound: 404, the tenant has none of this name.
            QueueUnreachable: the server does not answer.
        """
        return await _answer(*await self._find(request))

    @route(
        "POST /schedules/{name}/pause",
        json_answer("The schedule is paused.", SCHEDULE),
        tag="schedules",
        scope="control",
        parameters=(QUEUE,),
    )
    async def pause(self, request: Request) -> Response:
        """Pause a schedule. The times of the pause do not run.

        Raises:
            ScheduleNotFound: 404, the tenant has none of this name.
            HistoryUnavailable: the audit log cannot be written, so nothing is changed.
            QueueUnreachable: the server does not answer.
        """
        await self._change(request, "pause")
        return await self.show(request)

    @route(
        "POST /schedules/{name}/resume",
        json_answer("The schedule runs again.", SCHEDULE),
        tag="schedules",
        scope="control",
        parameters=(QUEUE,),
    )
    async def resume(self, request: Request) -> Response:
        """Resume a paused schedule.

        Raises:
            ScheduleNotFound: 404, the tenant has none of this name.
            HistoryUnavailable: the audit log cannot be written, so nothing is changed.
            QueueUnreachable: the server does not answer.
        """
        await self._change(request, "resume")
        return await self.show(request)

    @route(
        "DELETE /schedules/{name}",
        json_answer("The schedule is removed; its jobs continue.", SCHEDULE),
        tag="schedules",
        scope="control",
        parameters=(QUEUE,),
    )
    async def remove(self, request: Request) -> Response:
        """Remove a schedule. Jobs that it has submitted continue.

        Raises:
            ScheduleNotFound: 404, the tenant has none of this name.
            HistoryUnavailable: the audit log cannot be written, so nothing is changed.
            QueueUnreachable: the server does not answer.
        """
        return await _answer(*await self._change(request, "remove"))

    async def _change(self, request: Request, change: Change) -> tuple[QueueClients, KeptSchedule]:
        """Change the schedule that a request names; return its queue, and what it was."""
        queue, kept = await self._find(request)
        await self._changes.change(caller_of(request), queue, kept, change)
        return queue, kept

    async def _find(self, request: Request) -> tuple[QueueClients, KeptSchedule]:
        """Return the schedule of the caller that a request names, and its queue."""
        name, tenant = request.path_params["name"], caller_of(request).tenant
        for queue in asked_queues(self._queues, request):
            with suppress(ScheduleNotFound):
                return queue, await queue.submitting.run(schedules.find(queue.submitting.target, name, tenant))
        raise ScheduleNotFound(name, tenant)


def _fields(body: object) -> dict[str, Any]:  # Any: JSON, which `Schedule` checks
    """Return the fields of a request. A null field counts as absent.

    Raises:
        HttpError: it is not an object, a field is unknown, or one is missing.
    """
    if not isinstance(body, dict):
        raise bad_request("the body must be an object", param="body")
    found = {name: value for name, value in cast("dict[str, Any]", body).items() if value is not None}
    known: Mapping[str, Schema] = NEW["properties"]
    for name in found.keys() - known.keys():
        raise bad_request(f"unknown field {name!r:.100}", code="unknown_parameter", param=name)
    for name in sorted({*NEW["required"]} - found.keys()):
        raise bad_request(f"{name} is missing", param=name)
    return found


def _jobs(jobs: object, caller: Caller) -> list[CheckedJob]:
    """Return the checked jobs of a request.

    Raises:
        HttpError, RequestRefused, InvalidJob: one of them is wrong, or they are no list.
    """
    if not isinstance(jobs, list) or not 1 <= len(cast("list[object]", jobs)) <= MAX_JOBS:
        raise bad_request(f"jobs must be a list of 1 to {MAX_JOBS} jobs", param="jobs")
    return [_job(body, caller) for body in cast("list[object]", jobs)]


def _job(body: object, caller: Caller) -> CheckedJob:
    _refuse_waiting(body)
    job = read_job(body, caller)
    with named({PROMPT: prompt_name(cast("dict[str, object]", body))}):
        return callers_job(caller, job.prompt, job.options)


def _refuse_waiting(body: object) -> None:
    fields = cast("dict[str, object]", body) if isinstance(body, dict) else {}
    for name in WAITING:
        if fields.get(name) is not None:
            why = f"a scheduled job has no {name}: each run is submitted when it is due, and waits for no other job"
            raise RequestRefused("unknown_parameter", why, name)


async def _answer(
    queue: QueueClients, kept: KeptSchedule, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return JSONResponse(_shown(queue.name, await on_thread(kept.view)), status, headers)


def _shown(queue: str, view: ScheduleView) -> dict[str, object]:
    values = {name: getattr(view, name) for name in SHOWN}
    values["last_run"] = _text(view.last_run)
    values["next_runs"] = [_text(moment) for moment in view.next_runs]
    return {"queue": queue, **values}


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
