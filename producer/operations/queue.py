"""A queue: its keys, and its settings for clients. No I/O."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from sluice.producer.errors import InvalidJob, ProducerError, QueueUnreachable
from sluice.producer.operations.operation import Ask, Operation, Reply
from sluice.protocol import limits
from sluice.protocol.formats import look_for_format_1, said_of_format_1
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.keys import QueueKeys, served_partitions
from sluice.protocol.queue_shares import is_queue_name
from sluice.protocol.wire import WireError

LOG = logging.getLogger(__name__)

KEPT_S = 10.0
"""How long settings are cached, in seconds."""


@dataclass(slots=True, eq=False)
class Queue:
    """A queue's name, number of partitions and default durability. Changes when the queue's settings are read.

    Raises:
        InvalidJob: the name cannot be part of a key, or the number of partitions is not positive.
    """

    name: str
    asked_partitions: int | None = None
    """The user's number of partitions; None: that of the workers."""

    partitions: int = field(init=False)
    """The number of partitions as last read; before that, and while no worker has written one: the user's, or 1."""

    is_named: bool = field(init=False)
    """Whether `partitions` is the user's or the workers' number, not the default."""

    rates: dict[QueueKeys, tuple[float, float | None]] = field(
        default_factory=dict[QueueKeys, tuple[float, float | None]], init=False
    )
    """When a partition's rate, in output tokens a second, was last read, and its value."""

    _durability: Reply = field(default=None, init=False)
    _read_s: float = field(default=float("-inf"), init=False)
    _has_warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.partitions = 1 if self.asked_partitions is None else self.asked_partitions
        self.is_named = self.asked_partitions is not None
        if not is_queue_name(self.name) or self.partitions < 1:
            raise InvalidJob(
                f"a queue's name is 1 to {limits.MAX_QUEUE_NAME_CHARS} characters without braces, colons and spaces, "
                f"and it has 1 partition or more; got {self.name!r} and {self.partitions}"
            )

    @property
    def is_known(self) -> bool:
        """Whether the number of partitions was given or has been read."""
        return self.asked_partitions is not None or self._read_s > float("-inf")

    def read(self, partition: int = 0) -> Operation[Reply]:
        """Read the settings, unless they are cached; return the default durability.

        Args:
            partition: The partition to read if partition 0 does not answer.

        Raises:
            InvalidSetting: the workers serve another number of partitions than the user gave.
        """
        if monotonic() - self._read_s > KEPT_S:
            yield from self._read_any(partition)
        return self._durability

    def forget(self) -> None:
        """Forget the cached settings, after this client has changed them."""
        self._read_s = float("-inf")

    def _read_any(self, partition: int) -> Operation[None]:
        try:
            yield from self._read_one(0)
        except QueueUnreachable:
            if partition == 0:
                raise
            # In a Cluster, perhaps only the shard of partition 0 is down. It is read first, because every queue has
            # it, even one with fewer partitions than the user gave.
            yield from self._read_one(partition)

    def _read_one(self, partition: int) -> Operation[None]:
        config = self.keys(partition).key("config")
        settings = ("HGET", config, "durability"), ("HGET", config, "partitions")
        durability, stated, *earlier = yield Ask((*settings, look_for_format_1(self.keys(partition))), is_lenient=True)
        for reply in (durability, stated):
            if isinstance(reply, ProducerError):
                raise reply
        self._warn_of_jobs_left_behind(earlier)
        # A server that has lost the settings has none until a worker writes them again.
        named = served_partitions(self.name, stated, self.asked_partitions)
        self.partitions, self.is_named = named or self.partitions, self.is_named or named is not None
        self._durability, self._read_s = durability, monotonic()

    def _warn_of_jobs_left_behind(self, replies: Sequence[Reply]) -> None:
        sentence = said_of_format_1(self.name, replies)
        if sentence is not None and not self._has_warned:
            LOG.warning("%s", sentence)
            self._has_warned = True

    def keys(self, partition: int) -> QueueKeys:
        """Return the keys of one partition."""
        return QueueKeys(self.name, partition)

    def keys_of(self, job_id: str) -> QueueKeys:
        """Return the keys of the partition that has this job.

        Raises:
            InvalidJob: the text is not a job id.
        """
        return QueueKeys(self.name, partition_in(job_id))

    def all_keys(self) -> Operation[list[QueueKeys]]:
        """Return the keys of every partition.

        Raises:
            InvalidSetting: as `read`.
        """
        yield from self.read()
        return [self.keys(partition) for partition in range(self.partitions)]


def partition_in(job_id: str) -> int:
    """Return the partition of a job id.

    Raises:
        InvalidJob: the text is not a job id.
    """
    try:
        return split_job_id(job_id)[0]
    except (WireError, TypeError) as error:
        raise InvalidJob(str(error)) from error
