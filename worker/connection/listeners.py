"""Listen to the queue's notification stream (key `bell`), so that an idle worker wakes when jobs may be ready.

A thread with its own connection blocks in XREAD from the id that the last pull returned, and wakes the pull thread. It
takes no jobs. Each call of `listen` arms it once, so a busy worker is not woken by every submit. In a Redis Cluster a
blocking read cannot span shards, so each partition has its own listener.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from redis.exceptions import RedisError

from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.transport.backoff import Backoff
from sluice.worker.connection.clients import Client, Connections, is_cluster
from sluice.worker.errors import ComponentDied

BLOCK_MS = 500
FIRST_DELAY_S = 0.05
MAX_DELAY_S = 1.0


class WakeupListener(Protocol):
    """Wakes the worker when jobs may be ready."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def listen(self, after: Mapping[QueueKeys, str]) -> None: ...
    def take_notified(self) -> list[tuple[QueueKeys, str]]: ...


class NotificationListener:
    """One listener for several partitions of a queue."""

    def __init__(self, client: Client, wake: Callable[[], None], died: Callable[[ComponentDied], None]) -> None:
        self._client = client
        self._wake = wake
        self._died = died
        self._asked = threading.Condition()
        self._after: dict[QueueKeys, str] | None = None
        self._notified: dict[QueueKeys, str] = {}
        self._is_listening = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)

    def start(self) -> None:
        """Start the thread, not armed yet."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and interrupt its blocking read."""
        with self._asked:
            self._is_closing = True
            self._asked.notify()
        self._client.connection_pool.disconnect(inuse_connections=True)
        if self._thread.ident is not None:
            self._thread.join()

    def listen(self, after: Mapping[QueueKeys, str]) -> None:
        """Wake at the first entry after these ids, which the last pulls returned. Has no effect while armed."""
        with self._asked:
            if not self._is_listening:
                self._is_listening = True
                self._after = dict(after)
                self._asked.notify()

    def take_notified(self) -> list[tuple[QueueKeys, str]]:
        """Return the partitions with notifications since the last call, each with its newest id."""
        with self._asked:
            notified, self._notified = list(self._notified.items()), {}
            return notified

    def _run(self) -> None:
        try:
            while (after := self._next()) is not None:
                self._wait_for(after)
        except Exception as error:  # noqa: BLE001  # the loop must stop on any error
            if not self._is_closing:
                self._died(ComponentDied("notifications", error))

    def _next(self) -> dict[QueueKeys, str] | None:
        with self._asked:
            while self._after is None and not self._is_closing:
                self._asked.wait()
            after, self._after = self._after, None
            return None if self._is_closing else after

    def _wait_for(self, after: dict[QueueKeys, str]) -> None:
        """Block until a partition has a notification. The pull thread reports an unreachable Redis, not this one."""
        names = {keys.key("bell").encode(): keys for keys in after}
        backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        notified: dict[QueueKeys, str] = {}
        while not notified and not self._is_closing:
            try:
                notified = self._read({keys.key("bell"): last for keys, last in after.items()}, names)
            except (RedisError, OSError):
                with self._asked:
                    self._asked.wait(backoff.next_delay_s())
        with self._asked:
            self._notified.update(notified)
            self._is_listening = False
        self._wake()

    def _read(self, after: dict[str, str], names: Mapping[bytes, QueueKeys]) -> dict[QueueKeys, str]:
        reply: Any = self._client.xread(after, block=BLOCK_MS)  # redis-py's replies are untyped
        return {names[name]: entries[-1][0].decode() for name, entries in reply or ()}


class PartitionListeners:
    """One listener per partition."""

    def __init__(self, listeners: Mapping[QueueKeys, NotificationListener]) -> None:
        self._listeners = dict(listeners)

    def start(self) -> None:
        """Start the threads, not armed yet."""
        for listener in self._listeners.values():
            listener.start()

    def stop(self) -> None:
        """Stop the threads and interrupt their blocking reads."""
        for listener in self._listeners.values():
            listener.stop()

    def listen(self, after: Mapping[QueueKeys, str]) -> None:
        """As `NotificationListener.listen`."""
        for keys, last in after.items():
            self._listeners[keys].listen({keys: last})

    def take_notified(self) -> list[tuple[QueueKeys, str]]:
        """As `NotificationListener.take_notified`."""
        return [one for listener in self._listeners.values() for one in listener.take_notified()]


def make_listener(
    connections: Connections,
    partitions: Sequence[QueueKeys],
    wake: Callable[[], None],
    died: Callable[[ComponentDied], None],
) -> WakeupListener:
    """Make one listener for all partitions, or one per partition where they are on several shards."""
    if is_cluster(connections.uplink.client) and len(partitions) > 1:
        return PartitionListeners({keys: NotificationListener(connections.open(), wake, died) for keys in partitions})
    return NotificationListener(connections.open(), wake, died)
