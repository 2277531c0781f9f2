"""The state that all components of one worker share: its identity, its held jobs, and the queues of its threads."""

from collections import defaultdict
from dataclasses import dataclass, field

from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.worker.clock import ServerClock
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.availability import RedisHealth
from sluice.worker.connection.unavailable_partitions import UnavailablePartitions
from sluice.worker.jobs.capacity import Capacity
from sluice.worker.jobs.ended import EndedJobs
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.leases import Leases
from sluice.worker.jobs.results import Origin
from sluice.worker.log import Log
from sluice.worker.serve.mailbox import Mailbox
from sluice.worker.serve.metrics import Meters
from sluice.worker.serve.settings_memory import SettingsMemory
from sluice.worker.signals import Quiet
from sluice.worker.watchdog import Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The shared state of one worker. Built once, at start; each member is safe to use from any thread."""

    incarnation: str
    partitions: tuple[QueueKeys, ...]
    config: WorkerConfig
    origin: Origin
    cache_tokens: int
    """Size of the engine's KV cache."""

    leases: Leases
    mailbox: Mailbox
    clock: ServerClock
    health: RedisHealth
    unavailable: UnavailablePartitions
    meters: Meters
    watchdog: Watchdog
    log: Log
    settings: SettingsMemory = field(default_factory=SettingsMemory)
    quiet: Quiet = field(default_factory=Quiet)
    capacity: Capacity = field(default_factory=Capacity)
    ended: dict[str, EndedJobs] = field(default_factory=lambda: defaultdict(EndedJobs))
    """The jobs of each queue that ended here."""

    def flag(self, job: HeldJob, state: JobState) -> None:
        """End a job with `state`: now if the engine has it, before its admission otherwise."""
        with self.leases.lock:
            if job.flag(state):
                self.log.info("job flagged", job_id=job.id, attempt=job.leased.attempt, state=state)
                if job.was_admitted:
                    self.mailbox.cancel([job.request_id])

    def lose(self, job: HeldJob, why: str) -> bool:
        """Release a job whose lease is lost, and drop its request; return False if it was not held."""
        if not self.leases.remove(job):
            return False
        self.mailbox.lose([job.request_id])
        self.meters.num_jobs_lost += 1
        self.log.warning("job lost", job_id=job.id, attempt=job.leased.attempt, why=why)
        return True
