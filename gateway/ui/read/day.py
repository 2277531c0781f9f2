"""Usage of tenants in the last day, summed and cached by hour, because a day may have millions of jobs."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from sluice.gateway.tables.database import Database
from sluice.gateway.threads import HISTORY
from sluice.gateway.ui.read.usage import TenantUsage, usage_in_hour
from sluice.history.tables import HOUR_MS
from sluice.protocol.clock import wall_ms

HOURS = 24
WAIT_S = 0.08
"""How long a page waits for hours that are not counted yet, in seconds."""

RECENT_EVERY_S, OLD_EVERY_S = 5.0, 3600.0
"""Time after which the newest two hours are counted again, and that of the others, as a recorder may be late."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The usage in one hour, and when it was read."""

    usage: Mapping[str, TenantUsage]
    read_s: float


class DayUsage:
    """The usage in the last day. Changes with each reading: hours are cached."""

    def __init__(self, database: Database, queues: Sequence[str]) -> None:
        self._database, self._queues = database, queues
        self._hours: dict[int, Counted] = {}
        self._reading: asyncio.Task[None] | None = None

    async def get(self, wait_s: float = WAIT_S) -> tuple[Mapping[str, TenantUsage], int]:
        """Return the usage by tenant, and the number of hours that are not counted yet.

        Raises:
            HistoryUnavailable: the database does not answer.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait((self._reading,), timeout=wait_s)
        if self._reading.done():
            self._reading.result()
        total: dict[str, TenantUsage] = {}
        counted = [self._hours[hour_ms] for hour_ms in _hours() if hour_ms in self._hours]
        for hour in counted:
            for tenant, usage in hour.usage.items():
                total[tenant] = total.get(tenant, TenantUsage()) + usage
        return total, HOURS - len(counted)

    async def _read(self) -> None:
        """Count the hours that are due, the newest first."""
        hours = _hours()
        self._hours = {hour_ms: hour for hour_ms, hour in self._hours.items() if hour_ms in hours}
        for number, hour_ms in enumerate(hours):
            every_s, read = RECENT_EVERY_S if number < 2 else OLD_EVERY_S, self._hours.get(hour_ms)
            if read is None or monotonic() - read.read_s >= every_s:
                began_s = monotonic()
                usage = await HISTORY.run(usage_in_hour, self._database, self._queues, hour_ms)
                self._hours[hour_ms] = Counted(usage, began_s)


def _hours() -> list[int]:
    """Return the hours of the last day, the newest first."""
    now_ms = wall_ms()
    newest_ms = now_ms - now_ms % HOUR_MS
    return [newest_ms - HOUR_MS * number for number in range(HOURS)]
