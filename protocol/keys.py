"""Names of Redis keys. The keys of one partition share a hash tag. Chains and schedules name theirs by these."""

from collections.abc import Iterable
from dataclasses import dataclass

from sluice.protocol.errors import InvalidSetting
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.limits import MAX_PRIORITY
from sluice.protocol.wire import JobId

FORMAT = 2
"""The format of the keys and their values, a part of every key's name: programs of two formats share no key.

It grows with a change that scripts of the format before cannot read (docs/decisions/a-format-has-its-own-keys.md).
"""

RETURNED = "returned"
"""The reserved class of returned and retried entries; it is served first."""


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """Keys of one partition of one queue."""

    queue: str
    partition: int = 0

    @property
    def prefix(self) -> str:
        """The hash tag and the format; every key is `<prefix>:<name>`."""
        return f"{{{self.queue}:{self.partition}}}:{FORMAT}"

    @property
    def prefix_of_format_1(self) -> str:
        """The prefix of the format before, which had no number. `worker migrate-queue` reads its keys."""
        return f"{{{self.queue}:{self.partition}}}"

    def key(self, *parts: str | int) -> str:
        """Return `<prefix>:<part>:<part>…`."""
        return ":".join([self.prefix, *map(str, parts)])

    def fixed(self) -> tuple[str, ...]:
        """Return the key that every script declares; it derives the others, which are in the same slot."""
        return (self.key("config"),)

    @property
    def notifications(self) -> str:
        """Notification stream, on which idle workers block."""
        return self.key("bell")

    @property
    def outbox(self) -> str:
        """Stream of events on their way to SQL."""
        return self.key("outbox")

    @property
    def limits(self) -> str:
        """Hash of the limits of tenants."""
        return self.key("limits")

    @property
    def callbacks(self) -> str:
        """Stream of ended jobs and batches that request a webhook."""
        return self.key("callbacks")

    def heads_over(self, priority: int) -> tuple[str, ...]:
        """Return the keys of the classes above `priority`; a key exists if its class has waiting jobs."""
        return tuple(self.key("heads", above) for above in range(priority + 1, MAX_PRIORITY + 1))

    def lane(self, priority: int | str, tenant: str) -> str:
        """Return the stream of waiting entries of one tenant in one class."""
        return self.key("lane", priority, tenant)

    def job(self, job_id: JobId) -> str:
        """Return the row of one job."""
        return self.key("job", *split_job_id(job_id)[1:])

    def payload(self, job_id: JobId) -> str:
        """Return the key of the prompt."""
        return self.key("payload", *split_job_id(job_id)[1:])

    def result(self, job_id: JobId) -> str:
        """Return the key of the result, which expires."""
        return self.key("result", *split_job_id(job_id)[1:])

    def channel(self, job_id: JobId, choice: int = 0) -> str:
        """Return the stream of tokens of one choice."""
        return self.key("channel", *split_job_id(job_id)[1:], choice)


def by_queue(partitions: Iterable[QueueKeys]) -> dict[str, list[QueueKeys]]:
    """Group partitions by the name of their queue, in order."""
    grouped: dict[str, list[QueueKeys]] = {}
    for keys in partitions:
        grouped.setdefault(keys.queue, []).append(keys)
    return grouped


def served_partitions(queue: str, stated: object, asked: int | None) -> int | None:
    """Return a queue's number of partitions: its workers', else the user's; None if neither is known.

    Args:
        queue: Name of the queue.
        stated: The reply to HGET for its setting `partitions`, which workers write when they start.
        asked: The number that the user named, if any.

    Raises:
        InvalidSetting: the two numbers differ.
    """
    served = int(stated) if isinstance(stated, bytes) and stated.isdigit() else 0
    if served and asked not in (None, served):
        raise InvalidSetting(
            f"the workers of queue {queue!r} serve {served} partitions, and this client was made for {asked}: "
            f"leave out `partitions` (--partitions, SLUICE_PARTITIONS), or give {served}"
        )
    return served or asked
