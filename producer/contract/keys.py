"""Every Redis key, built in one place. All keys of a queue's partition share one hash tag."""

from dataclasses import dataclass
from functools import cache

from producer.contract.wire import JobId, split_job_id

RETURNED = "returned"
"""The reserved class of entries given back, retried or requeued; it is served first."""

FIXED = (
    "config",
    "counters",
    "depth",
    "leases",
    "timers",
    "delayed",
    "outbox",
    "callbacks",
    "bell",
    "dead",
    "suspects",
    "isolator",
    "alive",
    "served",
    "garbage",
)
"""Names of the keys that a queue's partition has once; every script declares them, `config` first."""


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """Keys of one partition of one queue."""

    queue: str
    partition: int = 0

    @property
    def prefix(self) -> str:
        """The hash tag; every key is `<prefix>:<name>`."""
        return f"{{{self.queue}:{self.partition}}}"

    def key(self, *parts: str | int) -> str:
        """`<prefix>:<part>:<part>…`."""
        return ":".join([self.prefix, *map(str, parts)])

    def fixed(self) -> tuple[str, ...]:
        """The keys that every script declares."""
        return _fixed(self.prefix)

    @property
    def bell(self) -> str:
        """Stream where idle workers wait."""
        return self.key("bell")

    @property
    def outbox(self) -> str:
        """Stream of events on their way to SQL."""
        return self.key("outbox")

    @property
    def callbacks(self) -> str:
        """Stream of ends that want a webhook."""
        return self.key("callbacks")

    def lane(self, priority: int | str, tenant: str) -> str:
        """Stream of waiting entries of one tenant in one class."""
        return self.key("lane", priority, tenant)

    def job(self, job_id: JobId) -> str:
        """Hash of one job."""
        return self.key("job", *split_job_id(job_id)[1:])

    def payload(self, job_id: JobId) -> str:
        """The prompt."""
        return self.key("payload", *split_job_id(job_id)[1:])

    def result(self, job_id: JobId) -> str:
        """The whole output, until it expires."""
        return self.key("result", *split_job_id(job_id)[1:])

    def channel(self, job_id: JobId, choice: int = 0) -> str:
        """Stream of one choice's tokens."""
        return self.key("channel", *split_job_id(job_id)[1:], choice)


@cache
def _fixed(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}:{name}" for name in FIXED)
