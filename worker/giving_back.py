"""Jobs that go back to the queue before their end, for the exchange: at a drain, or when another model began them."""

from collections import deque
from collections.abc import Sequence

from redis.exceptions import RedisError

from worker.clock import monotonic_s
from worker.common import Common
from worker.connections import Client
from worker.leases import HeldJob
from worker.life import hand_back


class GivingBack:
    """What is to be handed back. Any thread asks for it; the one that pulls does it in its turns."""

    def __init__(self, client: Client, common: Common) -> None:
        self._client = client
        self._common = common
        self._returns_unstarted = False
        self._waiting: deque[tuple[float, HeldJob]] = deque()
        self._due: list[HeldJob] = []

    def ask_for_unstarted(self) -> None:
        """Hand back the jobs of which the engine has not said anything."""
        self._returns_unstarted = True

    def ask_later(self, job: HeldJob) -> None:
        """Keep a job that another model began for a while, then let the others have it."""
        self._waiting.append((monotonic_s() + self._common.config.queue.model_wait_s, job))

    def next_due_s(self) -> float:
        """When the next job of another model is to go back, by the monotonic clock; infinity if there is none."""
        return self._waiting[0][0] if self._waiting else float("inf")

    def turn(self) -> None:
        """Hand back what is due and was not heard yet."""
        if self._returns_unstarted:
            self._returns_unstarted = False
            self._add([job for job in self._common.leases.all() if not job.has_begun and not job.has_ended])
            self._common.mailbox.interrupt()
        while self._waiting and self._waiting[0][0] <= monotonic_s():
            self._add([self._waiting.popleft()[1]])
        if self._due:
            self._return()

    def _add(self, jobs: Sequence[HeldJob]) -> None:
        with self._common.leases.lock:
            for job in jobs:
                job.is_returning = True
        self._common.mailbox.lose([job.request_id for job in jobs])
        self._due += jobs

    def _return(self) -> None:
        """What was not returned, since a partition is away, is still held, and due."""
        leases, absences = self._common.leases, self._common.absences
        for keys in self._common.partitions:
            mine = [job for job in self._due if job.keys == keys and leases.of_request(job.request_id) is job]
            if not mine or keys in absences:
                continue
            try:
                hand_back(self._client, keys, self._common.incarnation, leases, mine)
            except (RedisError, OSError) as error:
                absences.failed(keys, error)
            else:
                self._common.log.info("jobs handed back", count=len(mine))
        was_due, self._due = self._due, [job for job in self._due if leases.of_request(job.request_id) is job]
        if len(self._due) < len(was_due):
            self._common.mailbox.interrupt()
