"""The listener to notifications: on a real server, from the id that a pull returned."""

import threading
from collections.abc import Generator
from typing import Any

import pytest

from sluice.producer.contract.keys import QueueKeys
from sluice.worker.connection.clients import connect
from sluice.worker.connection.listeners import NotificationListener
from tests.servers import RedisServer

KEYS = QueueKeys("q")
PATIENCE_S = 60.0


class Listening:
    """A notification stream, and whether it woke anyone."""

    def __init__(self, url: str) -> None:
        self.woken = threading.Event()
        self.listener = NotificationListener(connect(url, timeout_s=5), self.woken.set, lambda _error: self.woken.set())
        self.listener.start()


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:  # redis-py types it in part
    with valkey.client() as client:
        yield client


@pytest.fixture
def listening(valkey: RedisServer) -> Generator[Listening]:
    listening = Listening(valkey.url)
    yield listening
    listening.listener.stop()


class TestGivenABellThatRangAfterThePullAndBeforeAnybodyListened:
    """The moment in which a submit is not seen by the pull, and its entry is there before the listener is."""

    def test_when_it_listens_from_the_pulls_id_then_it_hears_it(self, client: Any, listening: Listening) -> None:
        seen = client.xadd(KEYS.key("bell"), {"e": "1"}).decode()
        rung = client.xadd(KEYS.key("bell"), {"e": "1"}).decode()

        listening.listener.listen({KEYS: seen})

        assert listening.woken.wait(PATIENCE_S)
        assert listening.listener.take_notified() == [(KEYS, rung)]


class TestGivenABellThatNobodyRang:
    def test_when_one_comes_while_one_listens_then_it_is_received_once(self, client: Any, listening: Listening) -> None:
        seen = client.xadd(KEYS.key("bell"), {"e": "1"}).decode()
        listening.listener.listen({KEYS: seen})

        rung = client.xadd(KEYS.key("bell"), {"e": "1"}).decode()

        assert listening.woken.wait(PATIENCE_S)
        assert listening.listener.take_notified() == [(KEYS, rung)]
        assert listening.listener.take_notified() == []
