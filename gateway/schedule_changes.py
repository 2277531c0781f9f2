"""Add, pause, resume and remove schedules, with a row of the audit log. For the page and the native routes."""

from collections.abc import Sequence
from typing import Literal

from sluice.gateway.access import Caller
from sluice.gateway.audit import AuditLog
from sluice.gateway.queues import QueueClients
from sluice.producer.operations import schedules
from sluice.producer.operations.schedules import ScheduleView
from sluice.protocol.jobs import CheckedJob
from sluice.protocol.schedules.schedule import Schedule, schedule_id

Change = Literal["pause", "resume", "remove"]


async def add_schedule(
    audit: AuditLog, caller: Caller, queue: QueueClients, schedule: Schedule, jobs: Sequence[CheckedJob]
) -> ScheduleView:
    """Add a schedule, or replace the one of its name.

    Raises:
        InvalidJob: a job belongs to another tenant, or cannot be submitted more than once.
        HistoryUnavailable: the change cannot be recorded, so it is not made.
        TooManySchedules: the queue has as many as it may.
        QueueUnreachable: the server does not answer.
    """
    schedules.packed_jobs(schedule, jobs)  # what the queue cannot keep is refused without a row
    producer, target = queue.submitting, f"{schedule.id} {schedule.cron} {schedule.zone}"
    async with audit.action(caller, "add_schedule", target, queue.name):
        return await producer.run(schedules.add(producer.target, schedule, jobs))


async def change_schedule(
    audit: AuditLog, caller: Caller, queue: QueueClients, schedule: ScheduleView, change: Change
) -> None:
    """Pause, resume or remove a schedule.

    Raises:
        ScheduleNotFound: it is gone.
        HistoryUnavailable: the change cannot be recorded, so it is not made.
        QueueUnreachable: the server does not answer.
    """
    producer, name, tenant = queue.submitting, schedule.name, schedule.tenant
    async with audit.action(caller, f"{change}_schedule", schedule_id(tenant, name), queue.name):
        if change == "remove":
            await producer.remove_schedule(name, tenant=tenant)
        else:
            await producer.pause_schedule(name, tenant=tenant, is_paused=change == "pause")
