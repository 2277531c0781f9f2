"""Settings of `worker callbacks`."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.protocol.redis.urls import redacted
from sluice.worker.callbacks.webhooks import IpNetwork, Sender
from sluice.worker.config import LogConfig

RETRY_AFTER_S = (1, 5, 25, 120, 600, 1800, 3600, 7200, 21_600)
"""Delays before the nine retries of a webhook, nine and a half hours in total."""

EXPORT_AFTER_S = (5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 3600, 3600)
"""Delays between tries of an export while the history is incomplete or unreachable, four hours in total."""


class RqNames(NamedTuple):
    """Names of the rq queues of one `worker callbacks`."""

    webhooks: str
    chores: str
    gateway: str


def rq_job_id(name: str, rq_queue: str) -> str:
    """Return a job's id in an rq queue: rq's ids are shared by a whole Redis, and the queue's name ends uniquely."""
    return f"{name}-{rq_queue.rpartition('-')[2]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackSettings:
    """Where callbacks are read from, and how webhooks, exports and retention run."""

    redis_url: str = field(repr=False)
    """URL of the queue's Redis."""

    rq_url: str = field(repr=False)
    """URL of rq's Redis; may be the same."""

    redis_patience_s: float = 30.0
    """How long to wait for both at startup."""

    database_url: str = field(repr=False)
    queue: str = "default"
    partitions: int = 1
    name: str = ""
    """Consumer name of the mover, stable across restarts. Empty means the host name."""

    secret: str | None = field(default=None, repr=False)
    """Signing keys, separated by spaces. Without one, webhooks are refused."""

    networks: tuple[IpNetwork, ...] = ()
    """Private networks that webhooks may reach."""

    timeout_s: float = 10.0
    """Time limit of one delivery."""

    retry_after_s: Sequence[int] = RETRY_AFTER_S
    export_after_s: Sequence[int] = EXPORT_AFTER_S
    export_patience_s: float = 5.0
    """How long one try of an export waits for the recorder."""

    webhook_workers: int = 3
    """Number of rq worker processes that send webhooks. One tenant's webhooks use all but one of them at most."""

    retention_days: float | None = None
    prompt_retention_days: float | None = None
    file_retention_days: float | None = None
    """Of the gateway's files."""

    export_folder: str | None = None
    """Folder for completed batches as JSON lines. None disables exports."""

    files_url: str = field(default="", repr=False)
    """Where the gateway keeps files."""

    block_s: float = 0.5
    claim_after_s: float = 15.0
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def rq_names(self) -> RqNames:
        """The names of its rq queues, which differ for processes with other servers or folders.

        The names hold the queue and a digest of what the tasks work with. So processes that share rq's Redis never run
        each other's tasks, whose arguments do not have these settings.
        """
        # Without its own Redis, rq uses the queue's, by whatever address.
        server = "" if self.rq_url == self.redis_url else self.redis_url
        return RqNames(
            webhooks=self._rq_name("webhooks", server),
            chores=self._rq_name("chores", server, self.database_url, self.export_folder or ""),
            gateway=self._rq_name("gateway", server, self.database_url, self.files_url),
        )

    def _rq_name(self, kind: str, *works_with: str) -> str:
        # Without credentials, which change while the place stays the same.
        places = [re.sub(r"//[^/]*@", "//", redacted(url)) for url in works_with]
        digest = hashlib.sha256("\n".join([self.queue, *places]).encode()).hexdigest()[:12]
        return f"sluice-{kind}-{self.queue}-{digest}"

    @property
    def sender(self) -> Sender | None:
        """The sender of webhooks; None without a secret."""
        if self.secret is None:
            return None
        return Sender(secrets=self.secret, timeout_s=self.timeout_s, networks=self.networks)

    @property
    def slots(self) -> int:
        """Senders that the webhooks of one tenant may use at once."""
        return max(1, self.webhook_workers - 1)
