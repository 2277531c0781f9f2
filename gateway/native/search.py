"""Search for the job that a request names, in the queues that the gateway serves, for its caller only."""

from dataclasses import dataclass

from starlette.requests import Request

from sluice.gateway.access import caller_of
from sluice.gateway.errors import bad_request
from sluice.gateway.openapi.routes import text
from sluice.gateway.ownership import own_job_id, unknown_job
from sluice.gateway.queues import QueueClients, Queues
from sluice.protocol.calls import JobView
from sluice.protocol.wire import JobId

QUEUE = text("queue", "Queue of the job. Default: any that the gateway serves.")


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job of the caller, and the queue that has it."""

    id: JobId
    queue: QueueClients
    view: JobView


def asked_id(request: Request) -> JobId:
    """Return the id of the job to look for; see `own_job_id`.

    Raises:
        HttpError: 404, it is not a job id.
    """
    return own_job_id(caller_of(request), request.path_params["job_id"])


def asked_queues(queues: Queues, request: Request) -> list[QueueClients]:
    """Return the queue that a request names, or all.

    Raises:
        HttpError: 404, the gateway does not serve this queue.
    """
    name = QUEUE.read(request)
    return list(queues) if name is None else [queue_named(queues, name)]


def queue_named(queues: Queues, name: str) -> QueueClients:
    """Return a queue by its name.

    Raises:
        HttpError: 404, the gateway does not serve this queue.
    """
    try:
        return queues[name]
    except KeyError as error:
        message = "the gateway does not serve this queue"
        raise bad_request(message, code="queue_not_found", param="queue", status=404) from error


async def find_job(queues: Queues, request: Request) -> FoundJob:
    """Find the job of a request.

    Raises:
        HttpError: 404, no queue has the job, or it belongs to another tenant.
        QueueUnreachable: the server does not answer.
    """
    job_id = asked_id(request)
    for queue in asked_queues(queues, request):
        [view] = await queue.submitting.views([job_id])
        if view is not None:
            return FoundJob(job_id, queue, view)
    raise unknown_job()
