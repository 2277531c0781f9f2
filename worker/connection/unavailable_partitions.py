"""Partitions whose server does not answer. The worker skips them until they recover. Knows no jobs.

Each is probed on its own thread and connection, so that its timeouts do not delay the others.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.backoff import Backoff
from sluice.protocol.redis.error_kinds import CONNECTION_ERRORS
from sluice.worker.connection.availability import RedisHealth, RetryPolicy
from sluice.worker.connection.clients import Client


@dataclass(slots=True, eq=False)
class _FailedPartition:
    """One partition with failed calls. Changes until it answers."""

    retries: RetryPolicy = field(default_factory=RetryPolicy)
    is_away: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


class UnavailablePartitions:
    """The set of partitions that do not answer. Thread-safe."""

    def __init__(self, open_client: Callable[[], Client], health: RedisHealth, wake: Callable[[], None]) -> None:
        self._open_client = open_client
        self._health = health
        self._wake = wake
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._known: dict[QueueKeys, _FailedPartition] = {}
        self._clients: dict[QueueKeys, Client] = {}

    def __contains__(self, keys: object) -> bool:
        failed = self._known.get(keys) if isinstance(keys, QueueKeys) else None
        return failed is not None and failed.is_away

    def failed(self, keys: QueueKeys, error: RedisError | OSError) -> None:
        """Mark a partition unavailable until a probe succeeds. Probes back off exponentially.

        Raises:
            RedisError: `error` itself, after too many unexpected error replies in a row.
        """
        self._health.failed(keys.prefix, error)
        with self._lock:
            failed = self._known.setdefault(keys, _FailedPartition())
            if failed.is_away or self._closing.is_set():
                return
            delay_s = failed.retries.delay_after(error)
            failed.is_away = True
        threading.Thread(target=self._ask, args=(keys, delay_s), name="partition-check", daemon=True).start()

    def answered(self, keys: QueueKeys) -> None:
        """Forget the failures of a partition after all of its calls succeeded."""
        if keys not in self._known:
            return
        with self._lock:
            failed = self._known.get(keys)
            if failed is None or failed.is_away:
                return
            del self._known[keys]
        self._health.answered(keys.prefix)

    def when_back(self, keys: QueueKeys, act: Callable[[], None]) -> None:
        """Call `act` once the partition is available, or now if it is."""
        with self._lock:
            failed = self._known.get(keys)
            if failed is not None and failed.is_away:
                failed.waiting.append(act)
                return
        act()

    def stop(self) -> None:
        """Stop probing; no partition is unavailable from now on."""
        self._closing.set()
        for keys in list(self._known):
            self._back(keys)

    def _ask(self, keys: QueueKeys, delay_s: float) -> None:
        backoff = Backoff(first_s=delay_s)
        while not self._closing.wait(backoff.next_delay_s()) and not self._is_there(keys):
            pass
        self._back(keys)

    def _is_there(self, keys: QueueKeys) -> bool:
        if keys not in self._clients:
            self._clients[keys] = self._open_client()
        try:
            self._clients[keys].execute_command("EXISTS", keys.notifications)
        except CONNECTION_ERRORS:
            return False
        except RedisError:
            return True  # the server answers; the caller handles the error
        return True

    def _back(self, keys: QueueKeys) -> None:
        with self._lock:
            failed = self._known.get(keys, _FailedPartition())
            failed.is_away = False
            waiting, failed.waiting = failed.waiting, []
        for act in waiting:
            act()
        self._wake()
