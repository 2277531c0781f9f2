"""Add, list, pause, resume and remove the schedules of a caller's tenant."""

import asyncio
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway.access import Caller, caller_of
from sluice.gateway.audit import AuditLog
from sluice.gateway.errors import bad_request, named
from sluice.gateway.native.search import QUEUE, asked_queues, queue_named
from sluice.gateway.native.submit import BODY, WAITING, prompt_name, read_job
from sluice.gateway.openapi.routes import JSON, json_answer, route
from sluice.gateway.openapi.schemas import TEXT, Schema, list_of, object_schema, schema_of
from sluice.gateway.queues import QueueClients, Queues
from sluice.gateway.requests import read_json
from sluice.gateway.schedule_changes import Change, add_schedule, change_schedule
from sluice.gateway.settings import GatewaySettings
from sluice.producer.errors import ScheduleNotFound
from sluice.producer.operations import schedules
from sluice.producer.operations.schedules import ScheduleView
from sluice.protocol.jobs import CheckedJob, checked_job
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
SCHEDULES = object_schema("Schedules", data=list_of(SCHEDULE))


class ScheduleRoutes:
    """The routes of schedules."""

    def __init__(self, queues: Queues, audit: AuditLog, settings: GatewaySettings) -> None:
        self._queues, self._audit, self._max_bytes = queues, audit, settings.max_body_bytes

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
        """Add a schedule, or replace the one of its name. Its runs do not count against limits of the key.

        Raises:
            HttpError, RequestRefused, ProducerError: the request is refused, or cannot be recorded.
        """
        body = _fields(await read_json(request, self._max_bytes))
        caller = caller_of(request)
        jobs = _jobs(body.pop("jobs", None), caller)
        name = QUEUE.read(request)
        queue = self._queues.first if name is None else queue_named(self._queues, name)
        view = await add_schedule(self._audit, caller, queue, Schedule(tenant=caller.tenant, **body), jobs)
        return JSONResponse(_shown(queue, view), 201, headers={"location": f"/schedules/{view.name}"})

    @route(
        "GET /schedules",
        json_answer("By queue and name.", SCHEDULES),
        tag="schedules",
        scope="read",
        errors=(404,),
        parameters=(QUEUE,),
    )
    async def list_schedules(self, request: Request) -> Response:
        """List the tenant's schedules, each with its last run and its next ones.

        Raises:
            HttpError: 404, the gateway does not serve this queue.
            QueueUnreachable: the server does not answer.
        """
        queues, tenant = asked_queues(self._queues, request), caller_of(request).tenant
        found = await asyncio.gather(
            *(queue.submitting.schedules(tenant=tenant, num_next=schedules.NUM_NEXT) for queue in queues)
        )
        data = [_shown(queue, view) for queue, views in zip(queues, found, strict=True) for view in views]
        return JSONResponse({"data": data})

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
        return JSONResponse(_shown(*await self._find(request)))

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
        return JSONResponse(_shown(*await self._change(request, "remove")))

    async def _change(self, request: Request, change: Change) -> tuple[QueueClients, ScheduleView]:
        """Change the schedule that a request names; return its queue, and what it was."""
        queue, view = await self._find(request)
        await change_schedule(self._audit, caller_of(request), queue, view, change)
        return queue, view

    async def _find(self, request: Request) -> tuple[QueueClients, ScheduleView]:
        """Return the schedule of the caller that a request names, and its queue."""
        name, tenant = request.path_params["name"], caller_of(request).tenant
        for queue in asked_queues(self._queues, request):
            for view in await queue.submitting.schedules(tenant=tenant, num_next=schedules.NUM_NEXT):
                if view.name == name:
                    return queue, view
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
        # Runs do not count towards the limits of a key.
        return checked_job(job.prompt, {**job.options, "tenant": caller.tenant})


def _refuse_waiting(body: object) -> None:
    fields = cast("dict[str, object]", body) if isinstance(body, dict) else {}
    for name in WAITING:
        if fields.get(name) is not None:
            why = f"a scheduled job has no {name}: each run is submitted when it is due, and waits for no other job"
            raise RequestRefused("unknown_parameter", why, name)


def _shown(queue: QueueClients, view: ScheduleView) -> dict[str, object]:
    values = {name: getattr(view, name) for name in SHOWN}
    values["last_run"] = _text(view.last_run)
    values["next_runs"] = [_text(moment) for moment in view.next_runs]
    return {"queue": queue.name, **values}


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
