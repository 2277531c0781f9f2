"""What all parts of one worker share: who it is, what it holds, and how they reach each other."""

from dataclasses import dataclass, field

from producer.contract.keys import QueueKeys
from worker.absences import Absences
from worker.clock import ServerClock
from worker.config import WorkerConfig
from worker.early import Quiet
from worker.health import RedisHealth
from worker.leases import Leases
from worker.log import Log
from worker.mailbox import Mailbox
from worker.metrics import Meters
from worker.results import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Built once by the daemon; each member guards itself."""

    incarnation: str
    partitions: tuple[QueueKeys, ...]
    config: WorkerConfig
    origin: Origin
    leases: Leases
    mailbox: Mailbox
    clock: ServerClock
    health: RedisHealth
    absences: Absences
    meters: Meters
    log: Log
    quiet: Quiet = field(default_factory=Quiet)
