"""Read, add, pause, resume and remove schedules, with a row of the audit log. For the page and the native routes."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, ParamSpec, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from sluice.gateway.access import Caller
from sluice.gateway.api_keys.key import ApiKey
from sluice.gateway.audit import AuditLog
from sluice.gateway.errors import HttpError
from sluice.gateway.queues import QueueClients
from sluice.gateway.rates import KeyRates, check_runs, tokens_of
from sluice.gateway.refusals import refusal
from sluice.gateway.settings import GatewaySettings
from sluice.producer.errors import ProducerError
from sluice.producer.operations import schedules
from sluice.producer.operations.schedules import KeptSchedule, ScheduleView
from sluice.protocol.bounds import TENANT_SCHEDULED_JOBS, TENANT_SCHEDULES
from sluice.protocol.jobs import CheckedJob
from sluice.protocol.schedules.schedule import Schedule

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Change = Literal["pause", "resume", "remove"]
Listed: TypeAlias = tuple[str, ScheduleView]
"""The name of a queue, and one of its schedules."""

MAX_LISTED = 100
THREAD = ThreadPoolExecutor(1, thread_name_prefix="schedules")
"""Reads rules and computes their times, which takes up to 20 ms each. One, because it delays the event loop by up to
5 ms at a time.
"""


async def on_thread(call: Callable[Parameters, Result], *args: Parameters.args, **options: Parameters.kwargs) -> Result:
    """Run a call that reads rules or computes their times, without blocking the event loop."""
    return await asyncio.get_running_loop().run_in_executor(THREAD, partial(call, *args, **options))


async def page_of_schedules(
    queues: Iterable[QueueClients], tenant: str | None, *, num_next: int, limit: int = MAX_LISTED, after: str = ""
) -> tuple[list[Listed], str | None]:
    """Return schedules (of one tenant) by queue, tenant and name, and `after` of the next page.

    Raises:
        QueueUnreachable: the server does not answer.
    """
    begin, found = tuple(after.rpartition("/")[::2]), list[tuple[str, KeptSchedule]]()
    for queue in queues:
        kept = await queue.submitting.run(schedules.find_all(queue.submitting.target, tenant=tenant))
        found += [(queue.name, one) for one in kept if (queue.name, one.id) > begin]
    found.sort(key=lambda pair: (pair[0], pair[1].id))
    page = found[:limit]
    following = None if len(found) <= limit else f"{page[-1][0]}/{page[-1][1].id}"
    return await on_thread(_listed, page, num_next), following


def _listed(page: Iterable[tuple[str, KeptSchedule]], num_next: int) -> list[Listed]:
    return [(queue, view) for queue, kept in page for view in schedules.views([kept], num_next)]


class ScheduleChanges:
    """Changes of schedules. Each has a row of the audit log. Changes as schedules are added: those of a tenant in turn.

    Args:
        audit: The audit log.
        rates: The rate limits of API keys.
        settings: The settings with the bounds of a tenant.
    """

    def __init__(self, audit: AuditLog, rates: KeyRates, settings: GatewaySettings) -> None:
        self._audit, self._rates = audit, rates
        self._max_schedules, self._max_jobs = settings.tenant_schedules, settings.tenant_scheduled_jobs
        self._adding = WeakValueDictionary[str, asyncio.Lock]()

    async def add(
        self, caller: Caller, queue: QueueClients, schedule: Schedule, jobs: Sequence[CheckedJob]
    ) -> tuple[KeptSchedule, Mapping[str, str]]:
        """Add a schedule, or replace the one of its name; return it and the rate limit headers. A request of the key.

        Raises:
            HttpError: 429, a rate limit of the key is reached; 409, the tenant has as much as it may; 400, the runs of
                its schedules would exceed the limits of the key.
            InvalidJob: a job belongs to another tenant, or cannot be submitted more than once.
            HistoryUnavailable: the change cannot be recorded, so it is not made.
            TooManySchedules: the queue has as many as it may.
            QueueUnreachable: the server does not answer.
        """
        schedules.packed_jobs(schedule, jobs)  # what the queue cannot keep is refused without a row
        rates = await self._rates.charge(caller.key)
        try:
            return await self._add(caller, queue, schedule, jobs), rates
        except (HttpError, ProducerError):
            await self._rates.give_back(caller.key)
            raise

    async def _add(
        self, caller: Caller, queue: QueueClients, schedule: Schedule, jobs: Sequence[CheckedJob]
    ) -> KeptSchedule:
        producer, target = queue.submitting, f"{schedule.id} {schedule.cron} {schedule.zone}"
        async with self._adding.setdefault(schedule.tenant, asyncio.Lock()):
            found = await producer.run(schedules.find_all(producer.target, tenant=schedule.tenant))
            self._check(caller.key, schedule, jobs, found)
            async with self._audit.action(caller, "add_schedule", target, queue.name):
                return await producer.run(schedules.add(producer.target, schedule, jobs))

    def _check(
        self, key: ApiKey | None, schedule: Schedule, jobs: Sequence[CheckedJob], found: Sequence[KeptSchedule]
    ) -> None:
        others = [one.size for one in found if one.id != schedule.id]
        if len(others) == len(found) >= self._max_schedules:
            message = f"the tenant has {len(found)} schedules in this queue, and may have {self._max_schedules}"
            raise refusal(TENANT_SCHEDULES, f"{message}: remove one first, or give several jobs to one schedule")
        num_jobs = len(jobs) + sum(num_jobs for num_jobs, _ in others)
        if num_jobs > self._max_jobs:
            message = f"one run of each schedule of the tenant has {num_jobs} jobs, and may have {self._max_jobs}"
            raise refusal(TENANT_SCHEDULED_JOBS, f"{message} in this queue")
        check_runs(key, num_jobs, tokens_of(jobs) + sum(num_tokens for _, num_tokens in others))

    async def change(self, caller: Caller, queue: QueueClients, schedule: KeptSchedule, change: Change) -> None:
        """Pause, resume or remove a schedule.

        Raises:
            ScheduleNotFound: it is gone.
            HistoryUnavailable: the change cannot be recorded, so it is not made.
            QueueUnreachable: the server does not answer.
        """
        producer, name, tenant = queue.submitting, schedule.name, schedule.tenant
        async with self._audit.action(caller, f"{change}_schedule", schedule.id, queue.name):
            if change == "remove":
                await producer.remove_schedule(name, tenant=tenant)
            else:
                await producer.pause_schedule(name, tenant=tenant, is_paused=change == "pause")
