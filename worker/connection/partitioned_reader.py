"""Read one stream of each partition through a consumer group. Knows nothing of the entries' meaning.

The recorder and the mover of callbacks read in this way; each has its own turn.
"""

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from sluice.protocol.errors import Copyable
from sluice.protocol.keys import QueueKeys
from sluice.worker.connection.clients import Client
from sluice.worker.connection.outage import Outage
from sluice.worker.connection.stream_group import PAGE_ENTRIES, StreamGroup
from sluice.worker.log import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """The consumer, and timing."""

    group: str
    name: str
    """Consumer name, stable across restarts. Empty means the host name."""

    claim_after_s: float
    """Claim entries that another reader has held for this long."""

    block_s: float
    """Time limit of the blocking reads of one round over all partitions."""

    linger_s: float = 0.0
    """Pauses of one round over all partitions: after each turn of less than a page, so that the next one has more
    entries."""


@dataclass(slots=True, eq=False)
class PartitionStream:
    """One partition's stream. Changes with errors and recovery."""

    keys: QueueKeys
    stream: StreamGroup
    outage: Outage
    """Of the partition's server: shards fail independently."""

    has_answered: bool = False
    """Whether a turn has succeeded since the last error. A restarted server may have lost what was set before."""


class OtherServerAway(Copyable, RedisConnectionError):
    """Another server than the partition's does not answer, which the turn has reported."""

    def __init__(self, error: Exception, wait_s: float) -> None:
        """Take the cause, and the time until the next try."""
        super().__init__(str(error))  # pyright: ignore[reportUnknownMemberType]  # redis-py's arguments have no types
        self.wait_s = wait_s


class PartitionedReader(ABC):
    """A loop of turns over the streams of all partitions. The outage of one does not delay the others."""

    def __init__(
        self,
        client: Client,
        streams: Mapping[QueueKeys, str],
        settings: ReaderSettings,
        log: Log,
        stopping: threading.Event | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            client: Reads and acknowledges.
            streams: The key of each partition's stream.
            settings: The consumer, and timing.
            log: Logs outages.
            stopping: Set to end `run`.
        """
        name, claim_after_s = settings.name or socket.gethostname(), settings.claim_after_s
        self._client = client
        self._sources = [
            PartitionStream(
                keys,
                StreamGroup(client, key, group=settings.group, name=name, claim_after_s=claim_after_s),
                Outage("redis", log),
            )
            for keys, key in streams.items()
        ]
        self._block_s, self._linger_s = settings.block_s / len(streams), settings.linger_s / len(streams)
        self._log = log
        self._stopping = stopping or threading.Event()

    @abstractmethod
    def turn(self, source: PartitionStream, *, block_s: float) -> int:
        """Read some entries of a stream, use and acknowledge them. Return their number.

        Raises:
            OtherServerAway: another server does not answer. Nothing is lost.
            redis.RedisError, OSError: the partition's server does not answer. Nothing is lost.
        """

    def run(self) -> None:
        """Take turns until `stop`. A partition whose turn failed is skipped until its next try is due."""
        while not self._stopping.is_set():
            for source in self._sources:
                if not source.outage.wait_s:
                    self._try_turn(source, block_s=self._block_s)
            self._stopping.wait(min(source.outage.wait_s for source in self._sources))

    def stop(self) -> None:
        """Make `run` return. May be called repeatedly and from a signal handler."""
        self._stopping.set()

    def drain(self) -> int:
        """Take turns until all streams are empty and return the number of entries.

        Raises:
            RedisError, OSError: a server does not answer.
        """
        return sum(iter(lambda: sum(self._take_turn(source, block_s=0) for source in self._sources), 0))

    def drain_for(self, max_s: float) -> None:
        """Take turns until each stream is empty or has failed, for at most `max_s`."""
        until_s = time.monotonic() + max_s
        for source in self._sources:
            while self._try_turn(source, block_s=0) and time.monotonic() < until_s:
                pass

    def _take_turn(self, source: PartitionStream, *, block_s: float) -> int:
        num_entries = self.turn(source, block_s=block_s)
        source.has_answered = True
        return num_entries

    def _try_turn(self, source: PartitionStream, *, block_s: float) -> int:
        """Take a turn and return its number of entries, or record an outage and return 0."""
        try:
            num_entries = self._take_turn(source, block_s=block_s)
        except OtherServerAway as away:
            source.stream.recover()
            self._stopping.wait(away.wait_s)
            return 0
        except (RedisError, OSError) as error:
            source.has_answered = False
            source.stream.recover()
            source.outage.failed(error, key=source.stream.key)
            return 0
        source.outage.recovered(key=source.stream.key)
        if 0 < num_entries < PAGE_ENTRIES:
            self._stopping.wait(self._linger_s)
        return num_entries
