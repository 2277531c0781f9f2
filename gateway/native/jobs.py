"""Show jobs and their results, cancel and requeue them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.gateway.access import Caller, caller_of
from sluice.gateway.connections.encoding import encoded_answer
from sluice.gateway.errors import HttpError, bad_request
from sluice.gateway.native.bodies import CHANGED, JOB, JOBS, RESULT, Record, job_body, listed_body, result_body
from sluice.gateway.native.query import read_number, read_seconds, read_text
from sluice.gateway.native.records import Records
from sluice.gateway.native.search import JOB_ID, QUEUE, Found, Search
from sluice.gateway.openai.encoded_bodies import encoded
from sluice.gateway.openapi.routes import ApiRoute, Parameter, RouteDoc, json_answer
from sluice.gateway.ownership import own_batch, shown_batch, unknown_job
from sluice.history.filters import JobFilter, JobPlace
from sluice.history.queries import History, JobRow
from sluice.producer.bulk.recorded import recorded_outcome
from sluice.producer.errors import JobNotDone, JobNotFound, ResultExpired, ResultTimeout
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.results import PackedResult, packed_result
from sluice.producer.operations.views import JobStatus
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId

MAX_LISTED, LISTED = 1000, 50
FILTERS = (
    QUEUE,
    Parameter(name="batch", place="query", description="Only jobs of this batch."),
    Parameter(
        name="state", place="query", description="Only jobs in this state.", schema={"enum": [*map(str, JobState)]}
    ),
    Parameter(
        name="since",
        place="query",
        description="Only jobs submitted within this many seconds.",
        schema={"type": "number", "minimum": 0},
    ),
    Parameter(
        name="limit",
        place="query",
        description="Maximum number of jobs on a page.",
        schema={"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": LISTED},
    ),
    Parameter(name="after", place="query", description="The `next` of the previous page."),
)
ONE = (JOB_ID, QUEUE)
LIST_DOC = RouteDoc(
    tag="jobs",
    summary="List the tenant's jobs, newest first, from the history",
    answers={200: json_answer("One page.", JOBS)},
    errors=(404,),
    parameters=FILTERS,
)
SHOW_DOC = RouteDoc(
    tag="jobs",
    summary="Show a job: its state now, and its timeline",
    answers={200: json_answer("The job.", JOB)},
    errors=(404,),
    parameters=ONE,
)
RESULT_DOC = RouteDoc(
    tag="jobs",
    summary="Return the output of a job that has ended",
    answers={200: json_answer("Its output; `state` and `error` say whether it is complete.", RESULT)},
    errors=(404, 409, 410),
    parameters=ONE,
)
CANCEL_DOC = RouteDoc(
    tag="jobs",
    summary="Cancel a job",
    answers={200: json_answer("The state that it has reached.", CHANGED)},
    errors=(404,),
    parameters=ONE,
)
REQUEUE_DOC = RouteDoc(
    tag="jobs",
    summary="Requeue a failed job, which resumes after its last token",
    answers={200: json_answer("It waits again.", CHANGED)},
    errors=(404, 409),
    parameters=ONE,
)


Facts = TypeVar("Facts", JobRow, JobStatus)
"""What is known of a job."""


class JobRoutes:
    """The routes of jobs.

    Args:
        search: Finds them in their queues.
        records: Finds them in the history.
    """

    def __init__(self, search: Search, records: Records) -> None:
        self._search, self._records = search, records

    def routes(self) -> Iterator[ApiRoute]:
        """Yield the routes."""
        yield ApiRoute("GET", "/jobs", self.list_jobs, LIST_DOC, scope="read")
        yield ApiRoute("GET", "/jobs/{job_id}", self.show, SHOW_DOC, scope="read")
        yield ApiRoute("GET", "/jobs/{job_id}/result", self.result, RESULT_DOC, scope="read")
        yield ApiRoute("POST", "/jobs/{job_id}/cancel", self.cancel, CANCEL_DOC, scope="control")
        yield ApiRoute("POST", "/jobs/{job_id}/requeue", self.requeue, REQUEUE_DOC, scope="control")

    async def list_jobs(self, request: Request) -> Response:
        """List jobs from the history.

        Raises:
            HttpError: a filter is wrong, or the history cannot be read.
        """
        wanted, limit = self._filter(request), read_number(request, "limit", LISTED, least=1, most=MAX_LISTED)
        rows = await self._records.read(lambda history: history.jobs(wanted, limit=limit + 1))
        page = rows[:limit]
        following = None if len(rows) <= limit else str(JobPlace(page[-1].submitted_ms or 0, page[-1].id))
        data = [listed_body(_shown(row, caller_of(request))) for row in page]
        return JSONResponse({"data": data, "next": following})

    def _filter(self, request: Request) -> JobFilter:
        state = request.query_params.get("state")
        if state is not None and state not in list(JobState):
            raise bad_request(f"state must be one of {', '.join(JobState)}", param="state")
        since_s, caller, batch = read_seconds(request, "since"), caller_of(request), read_text(request, "batch")
        return JobFilter(
            queue=[queue.name for queue in self._search.asked_queues(request)],
            # A backend of the tenant's may have submitted under the name itself.
            batch=None if batch is None else (batch, own_batch(caller, batch)),
            state=state,
            tenant=caller.tenant,
            since_ms=None if since_s is None else round((time.time() - since_s) * 1000),
            after=_place(read_text(request, "after")),
        )

    async def show(self, request: Request) -> Response:
        """Show one job: from its queue, and from the history if it has one.

        Raises:
            HttpError: 404, neither has it.
            QueueUnreachable: the server does not answer.
        """
        job_id, queues, caller = self._search.asked_id(request), self._search.asked_queues(request), caller_of(request)
        now, names = None, [queue.name for queue in queues]
        for queue in queues:
            with suppress(JobNotFound):
                now, names = _shown(await queue.submitting.status(job_id), caller), [queue.name]
                break
        record = await self._records.read_if_possible(lambda history: _record(history, names, job_id))
        if record is not None:
            row, timeline, attempts = record
            record, names = (_shown(row, caller), timeline, attempts), [row.queue]
        if now is None and record is None:
            raise unknown_job()
        return JSONResponse(job_body(job_id, names[0], now, record))

    async def result(self, request: Request) -> Response:
        """Return the output of a job: from its queue, else from the history if that keeps it.

        Raises:
            HttpError: 404 unknown, 409 it has not ended, 410 its output has expired.
            QueueUnreachable: the server does not answer.
        """
        try:
            found = await self._search.find(request)
        except HttpError as error:
            if error.code != "job_not_found":
                raise
            names = [queue.name for queue in self._search.asked_queues(request)]
            return await self._kept(names, self._search.asked_id(request), error)
        try:
            packed = await found.queue.submitting.run(packed_result(Queue(found.queue.name), found.id, timeout_s=0))
            return await encoded_answer(packed.num_bytes, partial(_encoded, packed))
        except ResultTimeout as error:
            state = found.view.state
            raise bad_request(f"the job has not ended: it is {state}", code="job_not_ended", status=409) from error
        except ResultExpired:
            expired = bad_request("the output of the job has expired", code="result_expired", status=410)
            return await self._kept([found.queue.name], found.id, expired)

    async def _kept(self, queues: Sequence[str], job_id: JobId, otherwise: HttpError) -> Response:
        found = await self._records.read_if_possible(lambda history: _encoded_record(history, queues, job_id))
        if found is None:
            raise otherwise
        return Response(found, media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        """Cancel a job; one that has ended stays as it is.

        Raises:
            HttpError: 404, no queue has it.
            QueueUnreachable: the server does not answer.
        """
        found = await self._search.find(request)
        try:
            state = await found.queue.submitting.cancel(found.id)
        except JobNotFound as error:
            raise unknown_job() from error
        return JSONResponse({"id": found.id, "state": state})

    async def requeue(self, request: Request) -> Response:
        """Requeue a failed job.

        Raises:
            HttpError: 404, no queue has it; 409, it has not failed or cannot run again.
            QueueUnreachable: the server does not answer.
        """
        found = await self._search.find(request)
        [is_requeued] = await found.queue.submitting.requeue([found.id])
        if not is_requeued:
            raise _not_requeued(found)
        return JSONResponse({"id": found.id, "state": JobState.QUEUED})


def _encoded(packed: PackedResult) -> bytes:
    try:
        return encoded(result_body(packed.job_id, packed.unpack()))
    except JobNotDone as ended:
        return encoded(result_body(packed.job_id, ended.partial, ended))


def _encoded_record(history: History, queues: Sequence[str], job_id: JobId) -> bytes | None:
    outcome = recorded_outcome(history, queues, job_id)
    if outcome is None:
        return None
    ended = outcome.error if isinstance(outcome.error, JobNotDone) else None
    return encoded(result_body(job_id, outcome.result, ended))


def _record(history: History, queues: Sequence[str], job_id: JobId) -> Record | None:
    row = history.job(queues, job_id)
    return None if row is None else (row, history.timeline(row.queue, job_id), history.attempts(row.queue, job_id))


def _shown(facts: Facts, caller: Caller) -> Facts:
    return replace(facts, batch=shown_batch(caller, facts.batch))


def _place(text: str | None) -> JobPlace | None:
    place = None if text is None else JobPlace.read(text)
    if text is not None and place is None:
        raise bad_request("after must be the `next` of a page", param="after")
    return place


def _not_requeued(found: Found) -> HttpError:
    return bad_request(
        f"the job is {found.view.state}: only a failed job can be requeued, while the queue has its prompt and no "
        "newer job has its idempotency key",
        code="not_requeued",
        status=409,
    )
