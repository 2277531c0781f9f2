"""The listener to notifications, on each server: one of several is woken, and a lost wake-up goes to another."""

import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

from sluice.protocol.calls import Notification
from sluice.protocol.keys import QueueKeys
from sluice.worker.connection.clients import connect
from sluice.worker.connection.listeners import GROUP, NotificationListener
from tests.integration.jobs import wait_until
from tests.servers import RedisServer

pytestmark = pytest.mark.every_server

KEYS, OTHER = QueueKeys("q"), QueueKeys("q", 1)
PATIENCE_S = 20.0
LONG_S = 0.25
"""Longer than a notification may stay without an acknowledgement."""


class Listening:
    """A listener, and whether it woke anyone. Changes with the stream."""

    def __init__(self, url: str) -> None:
        self.woken = threading.Event()
        self.listener = NotificationListener(connect(url, timeout_s=5), self.woken.set, lambda _error: self.woken.set())
        self.listener.start()

    def listen(self, after: str = "0-0") -> "Listening":
        """Arm it."""
        self.listener.listen({KEYS: after})
        return self

    def notified(self) -> list[tuple[QueueKeys, Notification]]:
        """What woke it, once it was woken; it is not armed any more."""
        assert self.woken.wait(PATIENCE_S)
        self.woken.clear()
        return self.listener.take_notified()


@pytest.fixture
def client(any_redis: RedisServer) -> Generator[Any]:  # redis-py types it in part
    with any_redis.client() as client:
        yield client


@pytest.fixture
def listening(any_redis: RedisServer) -> Generator[Callable[[], Listening]]:
    """Makes listeners."""
    made: list[Listening] = []

    def make() -> Listening:
        made.append(Listening(any_redis.url))
        return made[-1]

    yield make
    for one in made:
        one.listener.stop()


def notify(client: Any, says: str = "1", entry_id: str = "*") -> str:
    """Write a notification."""
    return client.xadd(KEYS.notifications, {"e": says}, id=entry_id).decode()


def wait_until_blocked(client: Any, number: int = 1) -> None:
    """Until so many listeners wait for an entry."""
    wait_until(lambda: client.info("clients")["blocked_clients"] == number, "they listen")


def last_delivered(client: Any) -> str:
    return client.xinfo_groups(KEYS.notifications)[0]["last-delivered-id"].decode()


def num_unacknowledged(client: Any) -> int:
    return client.xpending(KEYS.notifications, GROUP)["pending"]


class TestGivenAListener:
    def test_when_it_listens_from_the_pulls_id_then_it_receives_what_came_between(
        self, client: Any, listening: Callable[[], Listening]
    ) -> None:
        seen, missed = notify(client), notify(client)

        assert listening().listen(seen).notified() == [(KEYS, Notification(missed, missed))]

        assert num_unacknowledged(client) == 1, "the pull acknowledges it"

    def test_when_one_comes_while_it_listens_then_it_is_received_once(
        self, client: Any, listening: Callable[[], Listening]
    ) -> None:
        one = listening().listen()
        wait_until_blocked(client)

        new = notify(client)

        assert one.notified() == [(KEYS, Notification(new, new))]
        assert one.listener.take_notified() == []

    def test_when_the_pull_has_seen_it_then_it_is_acknowledged_and_wakes_nobody(
        self, client: Any, listening: Callable[[], Listening]
    ) -> None:
        seen = notify(client)
        one = listening().listen(seen)
        wait_until_blocked(client)

        passed_on = notify(client, seen)

        wait_until(
            lambda: client.xinfo_groups(KEYS.notifications)[0]["last-delivered-id"].decode() == passed_on, "it is read"
        )
        wait_until(lambda: num_unacknowledged(client) == 0, "both are acknowledged")
        assert not one.woken.is_set()

    def test_when_a_later_pull_has_seen_it_then_it_wakes_nobody(
        self, client: Any, listening: Callable[[], Listening]
    ) -> None:
        one = listening().listen()
        wait_until_blocked(client)
        one.listen("9999999999999-0")

        notify(client)

        assert not one.woken.wait(LONG_S / 2)
        assert num_unacknowledged(client) == 0

    @pytest.mark.parametrize("says", ["9999999999999999-0", "1-1; x", "", "1"])
    def test_when_another_user_forges_a_chain_then_it_begins_a_new_one(
        self, client: Any, listening: Callable[[], Listening], says: str
    ) -> None:
        forged = notify(client, says)

        assert listening().listen().notified() == [(KEYS, Notification(forged, forged))]

    def test_when_the_stream_is_deleted_then_it_listens_on(
        self, client: Any, listening: Callable[[], Listening]
    ) -> None:
        one = listening().listen()
        wait_until_blocked(client)
        client.delete(KEYS.notifications)

        new = notify(client)

        assert one.notified() == [(KEYS, Notification(new, new))]

    def test_when_it_has_several_partitions_then_each_can_wake_it(
        self, client: Any, listening: Callable[[], Listening]
    ) -> None:
        one = listening()
        one.listener.listen({KEYS: "0-0", OTHER: "0-0"})
        wait_until_blocked(client)

        new = client.xadd(OTHER.notifications, {"e": "1"}).decode()

        assert one.notified() == [(OTHER, Notification(new, new))]


class TestGivenTwoListeners:
    @pytest.fixture
    def two(self, client: Any, listening: Callable[[], Listening]) -> tuple[Listening, Listening]:
        """Both armed, the first before the second."""
        first = listening().listen()
        wait_until_blocked(client)
        second = listening().listen()
        wait_until_blocked(client, 2)
        return first, second

    def test_when_a_notification_comes_then_it_wakes_one(self, client: Any, two: tuple[Listening, Listening]) -> None:
        new = notify(client)
        wait_until(lambda: any(one.woken.is_set() for one in two), "one is woken")
        client.xack(KEYS.notifications, GROUP, new)

        assert [one.woken.wait(LONG_S / 2) for one in two].count(True) == 1

    def test_when_two_come_then_both_are_woken(self, client: Any, two: tuple[Listening, Listening]) -> None:
        new = [notify(client), notify(client)]

        woken_by = sorted(notification.id for one in two for _, notification in one.notified())
        assert woken_by == new

    def test_when_the_woken_worker_does_not_pull_then_the_other_is_woken(
        self, client: Any, two: tuple[Listening, Listening]
    ) -> None:
        new = notify(client)

        assert [one.notified() for one in two] == [[(KEYS, Notification(new, new))]] * 2
