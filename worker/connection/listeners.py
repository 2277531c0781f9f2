"""Listen to the queue's notification stream (key `bell`), so that an idle worker wakes when jobs may be ready.

A thread with its own connection blocks in XREADGROUP and wakes the pull thread; it takes no jobs. All workers read as
one consumer, so each notification wakes one of them. The pull that it causes acknowledges it. If none does, because the
woken worker is stopped or dead, another idle worker takes the notification over
(docs/decisions/wake-one-worker.md). A busy worker does not listen. In a Redis Cluster a blocking read cannot span
shards, so each partition has its own listener.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from redis.exceptions import RedisError, ResponseError

from sluice.protocol.calls import Notification
from sluice.protocol.calls.base import read_stream_id
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.backoff import Backoff
from sluice.protocol.redis.execution import run_commands
from sluice.worker.connection.clients import Client, Connections, is_cluster
from sluice.worker.errors import ComponentDied

GROUP, CONSUMER = "workers", "idle"
BLOCK_MS = 100
"""An idle worker looks this often for notifications that no pull has acknowledged."""

ACKNOWLEDGED_WITHIN_MS = 50
"""A notification that is not acknowledged for this long goes to another worker."""

FIRST_DELAY_S = 0.05
MAX_DELAY_S = 1.0


class WakeupListener(Protocol):
    """A listener that wakes the worker when jobs may be ready."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def listen(self, after: Mapping[QueueKeys, str]) -> None: ...
    def take_notified(self) -> list[tuple[QueueKeys, Notification]]: ...


class NotificationListener:
    """One listener for several partitions of a queue."""

    def __init__(self, client: Client, wake: Callable[[], None], died: Callable[[ComponentDied], None]) -> None:
        self._client = client
        self._wake = wake
        self._died = died
        self._asked = threading.Condition()
        self._after: Mapping[QueueKeys, str] = {}
        self._notified: dict[QueueKeys, Notification] = {}
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
        """Wake once, at a notification after these ids, which the last pulls returned."""
        with self._asked:
            self._after = dict(after)
            if not self._is_listening:
                self._is_listening = True
                self._asked.notify()

    def take_notified(self) -> list[tuple[QueueKeys, Notification]]:
        """Return the partitions with notifications since the last call, each with its newest one."""
        with self._asked:
            notified, self._notified = list(self._notified.items()), {}
            return notified

    def _run(self) -> None:
        try:
            while self._is_asked():
                self._wait_for_one()
        except Exception as error:  # noqa: BLE001  # the loop must stop on any error
            if not self._is_closing:
                self._died(ComponentDied("notifications", error))

    def _is_asked(self) -> bool:
        """Wait until it is armed; return False at the end."""
        with self._asked:
            while not self._is_listening and not self._is_closing:
                self._asked.wait()
            return not self._is_closing

    def _wait_for_one(self) -> None:
        """Block until a partition has a notification. The pull thread reports an unreachable Redis, not this one."""
        backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        notified: dict[QueueKeys, Notification] = {}
        while not notified and not self._is_closing:
            try:
                notified = self._receive()
            except (RedisError, OSError):
                with self._asked:
                    self._asked.wait(backoff.next_delay_s())
        with self._asked:
            self._notified.update(notified)
            self._is_listening = False
        self._wake()

    def _receive(self) -> dict[QueueKeys, Notification]:
        try:
            received = self._read() or self._take_over()
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            self._make_groups()
            return {}
        new = {keys: self._sort_out(keys, notifications) for keys, notifications in received.items()}
        return {keys: notification for keys, notification in new.items() if notification is not None}

    def _read(self) -> dict[QueueKeys, list[Notification]]:
        names = {keys.notifications.encode(): keys for keys in self._after}
        streams = [*(keys.notifications for keys in self._after), *[">"] * len(names)]
        # Not by redis-py's `xreadgroup`: its way from the reply to here is a part of each wake-up.
        command = ("XREADGROUP", "GROUP", GROUP, CONSUMER, "BLOCK", BLOCK_MS, "STREAMS", *streams)
        [reply] = cast("list[Any]", run_commands(self._client, [command]))  # Any: lists of lists
        if isinstance(reply, Exception):
            raise reply
        return {names[name]: [_parse(*entry) for entry in entries] for name, entries in reply or ()}

    def _take_over(self) -> dict[QueueKeys, list[Notification]]:
        """Return the notifications that no pull has acknowledged in time."""
        unacknowledged: dict[QueueKeys, list[Notification]] = {}
        for keys in self._after:
            ids = self._client.xautoclaim(keys.notifications, GROUP, CONSUMER, ACKNOWLEDGED_WITHIN_MS, justid=True)
            unacknowledged[keys] = [Notification(entry_id.decode(), entry_id.decode()) for entry_id in ids]
        return unacknowledged

    def _sort_out(self, keys: QueueKeys, notifications: Iterable[Notification]) -> Notification | None:
        """Return the newest notification, if a pull is needed for it. Acknowledge the others."""
        rest = sorted(notifications, key=lambda notification: read_stream_id(notification.chain))
        newest = rest.pop() if rest and read_stream_id(rest[-1].chain) > read_stream_id(self._after[keys]) else None
        if rest:
            self._client.xack(keys.notifications, GROUP, *(notification.id for notification in rest))
        return newest

    def _make_groups(self) -> None:
        for keys in self._after:
            try:
                self._client.xgroup_create(keys.notifications, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise


_STREAM_ID = re.compile(rb"\d{1,20}-\d{1,20}")


def _parse(entry_id: bytes, fields: Sequence[bytes]) -> Notification:
    """Parse an entry. One that names itself or a later one begins a chain: another user may have written it."""
    own, chain = entry_id.decode(), dict(zip(fields[::2], fields[1::2], strict=True)).get(b"e", b"")
    is_passed_on = _STREAM_ID.fullmatch(chain) and read_stream_id(chain.decode()) < read_stream_id(own)
    return Notification(own, chain.decode() if is_passed_on else own)


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

    def take_notified(self) -> list[tuple[QueueKeys, Notification]]:
        """As `NotificationListener.take_notified`."""
        return [pair for listener in self._listeners.values() for pair in listener.take_notified()]


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
