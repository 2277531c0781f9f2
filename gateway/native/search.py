"""Find the job that a request names: in the queues that the gateway serves, and for its caller only."""

from dataclasses import dataclass

from starlette.requests import Request

from sluice.gateway.access import caller_of
from sluice.gateway.errors import HttpError, bad_request
from sluice.gateway.openapi.routes import Parameter
from sluice.gateway.ownership import own_job_id, unknown_job
from sluice.gateway.queues import QueueClients, Queues
from sluice.protocol.calls import JobView
from sluice.protocol.wire import JobId

QUEUE = Parameter(name="queue", place="query", description="Queue of the job. Default: any that the gateway serves.")
JOB_ID = Parameter(name="job_id", place="path", description="Id of a job.")


@dataclass(frozen=True, slots=True)
class Found:
    """A job of the caller's that a queue has."""

    id: JobId
    queue: QueueClients
    view: JobView


class Search:
    """The jobs of a gateway's queues."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def asked_id(self, request: Request) -> JobId:
        """Return the id of the job to look for; see `own_job_id`.

        Raises:
            HttpError: 404, it is no job id.
        """
        return own_job_id(caller_of(request), request.path_params["job_id"])

    def asked_queues(self, request: Request) -> list[QueueClients]:
        """Return the queue that a request names, or all.

        Raises:
            HttpError: 404, the gateway does not serve this queue.
        """
        name = request.query_params.get("queue")
        return self.all_queues() if name is None else [self.queue(name)]

    def all_queues(self) -> list[QueueClients]:
        """Return every queue that the gateway serves."""
        return list(self._queues)

    def queue(self, name: str) -> QueueClients:
        """Return a queue by its name.

        Raises:
            HttpError: 404, the gateway does not serve this queue.
        """
        try:
            return self._queues[name]
        except KeyError as error:
            raise unknown_queue() from error

    async def find(self, request: Request) -> Found:
        """Find the job of a request.

        Raises:
            HttpError: 404, no queue has it, or it belongs to another tenant.
            QueueUnreachable: the server does not answer.
        """
        job_id = self.asked_id(request)
        for queue in self.asked_queues(request):
            [view] = await queue.submitting.views([job_id])
            if view is not None:
                return Found(job_id, queue, view)
        raise unknown_job()


def unknown_queue() -> HttpError:
    """Return the error for a queue that the gateway does not serve."""
    return bad_request("the gateway does not serve this queue", code="queue_not_found", param="queue", status=404)
