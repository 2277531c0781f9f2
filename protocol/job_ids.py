"""Job ids: `<partition>.<tenant>.<random>`, so that a job's keys can be derived from its id."""

import re

from sluice.protocol import limits
from sluice.protocol.checks import is_text
from sluice.protocol.errors import InvalidJob, WireError
from sluice.protocol.messages import JobId

_JOB_ID = re.compile(
    rf"(0|[1-9][0-9]{{0,3}})\.([a-z0-9_-]{{1,{limits.MAX_TENANT_CHARS}}})\.([A-Za-z0-9_-]{{1,{limits.MAX_JOB_NAME_CHARS}}})"
)
_TENANT = re.compile(rf"[a-z0-9_-]{{1,{limits.MAX_TENANT_CHARS}}}")


def job_id_of(partition: int, tenant: str, name: str) -> JobId:
    """Return the id with these parts, each of which has been checked."""
    return JobId(f"{partition}.{tenant}.{name}")


def check_tenant(tenant: str) -> None:
    """Check the name of a tenant.

    Raises:
        InvalidJob: the name cannot be part of a key.
    """
    if not is_text(tenant) or not _TENANT.fullmatch(tenant):
        raise InvalidJob(
            f"tenant must be 1 to {limits.MAX_TENANT_CHARS} lower-case letters, digits, _ and -, got {tenant!r}"
        )


def split_job_id(job_id: str) -> tuple[int, str, str]:
    """Return partition, tenant and random part of an id.

    Raises:
        WireError: the text is not a job id.
    """
    match = _JOB_ID.fullmatch(job_id) if is_text(job_id) else None
    if match is None:
        raise WireError(f"not a job id: {repr(job_id)[:200]}; an id is PARTITION.TENANT.NAME, like 0.default.1f0c6a")
    partition, tenant, name = match.groups()
    return int(partition), tenant, name
