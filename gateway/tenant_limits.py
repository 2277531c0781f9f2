"""Set the limits of a tenant in a queue, with a row of the audit log. For the page and the native route."""

from collections.abc import Mapping

from sluice.gateway.access import Caller
from sluice.gateway.audit import AuditLog
from sluice.gateway.errors import bad_request
from sluice.gateway.queues import QueueClients
from sluice.protocol.calls import QueueSettings
from sluice.protocol.errors import InvalidJob
from sluice.protocol.job_ids import check_tenant


async def set_limits(
    audit: AuditLog, caller: Caller, queue: QueueClients, tenant: str, limits: Mapping[str, int | None]
) -> None:
    """Replace the limits of a tenant; `limits` has a value for each of `TENANT_LIMITS`, None for no limit.

    Raises:
        HttpError: 400, the name or a limit is not valid.
        HistoryUnavailable: the change cannot be recorded, so it is not made.
        QueueUnreachable: the server does not answer.
    """
    try:
        check_tenant(tenant)
        max_running, tokens_per_minute = limits["max_running"], limits["tokens_per_minute"]
        settings = QueueSettings(max_running={tenant: max_running}, tokens_per_minute={tenant: tokens_per_minute})
    except (InvalidJob, ValueError) as error:
        raise bad_request(str(error)) from error
    said = " ".join(f"{name}={'none' if most is None else most}" for name, most in limits.items())
    async with audit.action(caller, "set_limits", f"{tenant} {said}", queue.name):
        await queue.submitting.configure(settings)
