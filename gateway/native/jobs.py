"""Show jobs and their results, cancel and requeue them."""

import time
from collections.abc import Sequence
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
from sluice.gateway.native.records import Records
from sluice.gateway.native.search import QUEUE, FoundJob, asked_id, asked_queues, find_job
from sluice.gateway.openai.encoded_bodies import encoded
from sluice.gateway.openapi.routes import choice, json_answer, route, seconds, text, whole_number
from sluice.gateway.ownership import own_batch, shown_batch, unknown_job
from sluice.gateway.queues import Queues
from sluice.history.filters import JobFilter, JobPlace
from sluice.history.queries import History, JobRow
from sluice.producer.bulk.recorded import recorded_outcome
from sluice.producer.errors import JobNotDone, JobNotFound, ResultExpired, ResultTimeout
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.results import PackedResult, packed_result
from sluice.producer.operations.views import JobStatus
from sluice.protocol.states import RECORDED, JobState
from sluice.protocol.wire import JobId

BATCH = text("batch", "Only jobs of this batch.")
STATE = choice("state", "Only jobs in this state.", RECORDED, default=None)
SINCE = seconds("since", "Only jobs submitted within this many seconds.", default=None)
LIMIT = whole_number("limit", "Maximum number of jobs on a page.", default=50, least=1, most=1000)
AFTER = text("after", "The `next` of the previous page.")

Facts = TypeVar("Facts", JobRow, JobStatus)
"""Facts about a job."""


class JobRoutes:
    """The routes of jobs.

    Args:
        queues: The queues of the gateway.
        records: The job history.
    """

    def __init__(self, queues: Queues, records: Records) -> None:
        self._queues, self._records = queues, records

    @route(
        "GET /jobs",
        json_answer("One page.", JOBS),
        tag="jobs",
        scope="read",
        errors=(404,),
        parameters=(QUEUE, BATCH, STATE, SINCE, LIMIT, AFTER),
    )
    async def list_jobs(self, request: Request) -> Response:
        """List the tenant's jobs, newest first, from the history.

        Raises:
            HttpError: a filter is wrong, or the history cannot be read.
        """
        job_filter, limit = self._filter(request), LIMIT.read(request)
        rows = await self._records.read(lambda history: history.jobs(job_filter, limit=limit + 1))
        page = rows[:limit]
        following = None if len(rows) <= limit else str(JobPlace(page[-1].submitted_ms or 0, page[-1].id))
        data = [listed_body(_shown(row, caller_of(request))) for row in page]
        return JSONResponse({"data": data, "next": following})

    def _filter(self, request: Request) -> JobFilter:
        since_s, caller, batch = SINCE.read(request), caller_of(request), BATCH.read(request)
        return JobFilter(
            queue=[queue.name for queue in asked_queues(self._queues, request)],
            # The tenant may also have submitted to the queue directly, under the plain name.
            batch=None if batch is None else (batch, own_batch(caller, batch)),
            state=STATE.read(request),
            tenant=caller.tenant,
            since_ms=None if since_s is None else round((time.time() - since_s) * 1000),
            after=_place(AFTER.read(request)),
        )

    @route("GET /jobs/{job_id}", json_answer("The job.", JOB), tag="jobs", scope="read", parameters=(QUEUE,))
    async def show(self, request: Request) -> Response:
        """Show a job: its state now, and its timeline.

        Raises:
            HttpError: 404, neither the queue nor the history has the job.
            QueueUnreachable: the server does not answer.
        """
        job_id, queues, caller = asked_id(request), asked_queues(self._queues, request), caller_of(request)
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

    @route(
        "GET /jobs/{job_id}/result",
        json_answer("The output; `state` and `error` tell whether it is complete.", RESULT),
        tag="jobs",
        scope="read",
        errors=(409, 410),
        parameters=(QUEUE,),
    )
    async def result(self, request: Request) -> Response:
        """Return the output of a job that has ended.

        Raises:
            HttpError: 404, the job is unknown; 409, it has not ended; 410, its output has expired.
            QueueUnreachable: the server does not answer.
        """
        try:
            job = await find_job(self._queues, request)
        except HttpError as error:
            if error.code != "job_not_found":
                raise
            names = [queue.name for queue in asked_queues(self._queues, request)]
            return await self._kept(names, asked_id(request), error)
        try:
            packed = await job.queue.submitting.run(packed_result(Queue(job.queue.name), job.id, timeout_s=0))
            return await encoded_answer(packed.num_bytes, partial(_encoded, packed))
        except ResultTimeout as error:
            state = job.view.state
            raise bad_request(f"the job has not ended: it is {state}", code="job_not_ended", status=409) from error
        except ResultExpired:
            expired = bad_request("the output of the job has expired", code="result_expired", status=410)
            return await self._kept([job.queue.name], job.id, expired)

    async def _kept(self, queues: Sequence[str], job_id: JobId, otherwise: HttpError) -> Response:
        body = await self._records.read_if_possible(lambda history: _encoded_record(history, queues, job_id))
        if body is None:
            raise otherwise
        return Response(body, media_type="application/json")

    @route(
        "POST /jobs/{job_id}/cancel",
        json_answer("The state after the call.", CHANGED),
        tag="jobs",
        scope="control",
        parameters=(QUEUE,),
    )
    async def cancel(self, request: Request) -> Response:
        """Cancel a job.

        Raises:
            HttpError: 404, no queue has the job.
            QueueUnreachable: the server does not answer.
        """
        job = await find_job(self._queues, request)
        try:
            state = await job.queue.submitting.cancel(job.id)
        except JobNotFound as error:
            raise unknown_job() from error
        return JSONResponse({"id": job.id, "state": state})

    @route(
        "POST /jobs/{job_id}/requeue",
        json_answer("The job waits again.", CHANGED),
        tag="jobs",
        scope="control",
        errors=(409,),
        parameters=(QUEUE,),
    )
    async def requeue(self, request: Request) -> Response:
        """Requeue a failed job, which resumes after its last token.

        Raises:
            HttpError: 404, no queue has the job; 409, the job has not failed or cannot run again.
            QueueUnreachable: the server does not answer.
        """
        job = await find_job(self._queues, request)
        [is_requeued] = await job.queue.submitting.requeue([job.id])
        if not is_requeued:
            raise _not_requeued(job)
        return JSONResponse({"id": job.id, "state": JobState.QUEUED})


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


def _not_requeued(job: FoundJob) -> HttpError:
    return bad_request(
        f"the job is {job.view.state}: only a failed job can be requeued, while the queue has its prompt and no "
        "newer job has its idempotency key",
        code="not_requeued",
        status=409,
    )
