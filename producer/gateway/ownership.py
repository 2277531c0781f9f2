"""Which jobs a caller may see: those of its tenant. A job of another tenant must look like one that does not exist."""

from secrets import token_hex

from sluice.producer.contract.job_ids import split_job_id
from sluice.producer.contract.wire import JobId, WireError
from sluice.producer.gateway.access import Caller
from sluice.producer.gateway.errors import HttpError, bad_request


def own_job_id(caller: Caller, text: str, partitions: int) -> JobId:
    """Return the id of a job to look for in the caller's name.

    For a job of another tenant, it is an id that no job has. So whatever is done with it takes as long, and answers the
    same, as for an unknown job.

    Args:
        caller: Who asks.
        text: What the request says.
        partitions: Number of partitions of the queues.

    Raises:
        HttpError: 404, it is no job id.
    """
    try:
        partition, tenant, _ = split_job_id(text)
    except WireError as error:
        raise unknown_job() from error
    if partition >= partitions:
        raise unknown_job()
    return JobId(text if tenant == caller.tenant else f"{partition}.{caller.tenant}.{token_hex(32)}")


def unknown_job() -> HttpError:
    """Return the error for a job that is unknown, or of another tenant."""
    return bad_request("there is no such job, or its data has expired", code="job_not_found", status=404)
