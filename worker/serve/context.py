"""What all components of one worker share: its identity, its held jobs, and the objects between its threads."""

from dataclasses import dataclass, field

from sluice.protocol.keys import QueueKeys
from sluice.worker.checks.agreement import SettingsMemory
from sluice.worker.clock import ServerClock
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.availability import RedisHealth
from sluice.worker.connection.unavailable_partitions import UnavailablePartitions
from sluice.worker.jobs.capacity import Capacity
from sluice.worker.jobs.leases import Leases
from sluice.worker.jobs.results import Origin
from sluice.worker.log import Log
from sluice.worker.serve.mailbox import Mailbox
from sluice.worker.serve.metrics import Meters
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
