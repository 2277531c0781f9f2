"""Count from outside, in the leases alone, how many jobs of each tenant run at once while a soak goes on."""

import threading
from collections import Counter
from typing import Any

import redis

from sluice.protocol.job_ids import split_job_id
from sluice.protocol.wire import JobId
from tests.integration.jobs import KEYS

MAX_RUNNING = {"ant": 6, "bee": 13}
"""Limits of two of the soak's tenants. A worker has 16 places."""

TOKENS_PER_MINUTE = {"cow": 40_000}
"""Fewer than the tenant's jobs would take on a fast machine, so that it is parked now and then."""

EVERY_S = 0.05

# All in one step: between two commands a job may go from one worker to another.
_HELD = """
local held = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  for _, id in ipairs(redis.call('HKEYS', key)) do held[#held + 1] = id end
end
return held
"""


class LimitObserver:
    """A thread that counts twenty times a second. Mutable."""

    def __init__(self, client: Any) -> None:  # Any: a redis-py client
        self.most = Counter[str]()
        """Most jobs of a tenant that ran at once."""

        self.num_parked = 0
        """Times that the tenant with a limit of tokens was seen parked."""

        self.num_looks = 0
        self._has_failed = False
        self._client = client
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._observe, name="limits", daemon=True)
        self._thread.start()

    def _observe(self) -> None:
        while not self._is_over.wait(EVERY_S):
            try:
                self._look()
            except redis.RedisError:
                continue

    def _look(self) -> None:
        held = Counter(_tenant_of(job_id) for job_id in self._client.eval(_HELD, 0, f"{KEYS.key('held')}:*"))
        self.most = self.most | held
        self.num_parked += sum(self._client.zscore(KEYS.key("parked"), one) is not None for one in TOKENS_PER_MINUTE)
        self.num_looks += 1

    def stop(self) -> None:
        """Stop it."""
        self._has_failed = not self._thread.is_alive()
        self._is_over.set()
        self._thread.join()
        self._client.close()

    def problems(self) -> list[str]:
        """Return a sentence for each limit that was exceeded, and for what was not seen at all."""
        found = [
            f"{self.most[tenant]} jobs of {tenant} ran at once, its limit is {limit}"
            for tenant, limit in MAX_RUNNING.items()
            if self.most[tenant] > limit
        ]
        found += [f"no job of {tenant} was seen" for tenant in MAX_RUNNING if not self.most[tenant]]
        return [*found, *(["the counting thread ended by an error"] if self._has_failed else [])]

    def text(self) -> str:
        """For people."""
        most = ", ".join(f"{tenant} {self.most[tenant]} of {limit}" for tenant, limit in MAX_RUNNING.items())
        others = ", ".join(f"{tenant} {self.most[tenant]}" for tenant in sorted(self.most.keys() - MAX_RUNNING.keys()))
        parked = f"tenants at their limit of tokens seen parked {self.num_parked} times"
        return f"most jobs that ran at once, in {self.num_looks} looks: {most}; without a limit: {others}; {parked}"


def _tenant_of(job_id: bytes) -> str:
    return split_job_id(JobId(job_id.decode()))[1]
