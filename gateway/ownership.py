"""Ownership: a caller sees the jobs and batches of its tenant. Those of others must look as if they did not exist."""

from secrets import token_hex

from sluice.gateway.access import Caller
from sluice.gateway.errors import HttpError, bad_request
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.wire import JobId, WireError


def own_job_id(caller: Caller, text: str) -> JobId:
    """Return the id of the job to look up for a caller.

    For a job of another tenant, it is an id that no job has, so that each operation takes as long, and answers the
    same, as for an unknown job.

    Args:
        caller: The sender of the request.
        text: The job id in the request.

    Raises:
        HttpError: 404, the text is not a job id.
    """
    try:
        partition, tenant, _ = split_job_id(text)
    except WireError as error:
        raise unknown_job() from error
    return JobId(text if tenant == caller.tenant else f"{partition}.{caller.tenant}.{token_hex(32)}")


def own_batch(caller: Caller, name: str) -> str:
    """Return the queue's name for a batch that a caller names, because other tenants may use the same name.

    If the gateway has no keys, it is the same name. Tenants' names have no colon.
    """
    return f"{_scope_of(caller)}{name}"


def shown_batch(caller: Caller, name: str | None) -> str | None:
    """Return the caller's name for a batch of its jobs; a batch that was not submitted here keeps the queue's name."""
    return None if name is None else name.removeprefix(_scope_of(caller))


def _scope_of(caller: Caller) -> str:
    return "" if caller.key is None else f"{caller.tenant}:"


def unknown_job() -> HttpError:
    """Return the error for a job that is unknown, or of another tenant."""
    return bad_request("there is no such job, or its data has expired", code="job_not_found", status=404)
