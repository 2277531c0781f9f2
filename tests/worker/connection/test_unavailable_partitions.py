"""Who is away, when two threads tell of it at once."""

from types import TracebackType

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError

from sluice.protocol.keys import QueueKeys
from sluice.worker.connection.availability import RedisHealth
from sluice.worker.connection.clients import Client
from sluice.worker.connection.unavailable_partitions import UnavailablePartitions
from sluice.worker.log import get_log

KEYS = QueueKeys("q")


class Interloper:
    """In a lock's place: before it is had, another thread has done its part."""

    def __init__(self, unavailable: UnavailablePartitions) -> None:
        self._unavailable = unavailable

    def __enter__(self) -> None:
        self._unavailable._known.pop(KEYS, None)  # pyright: ignore[reportPrivateUsage]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


@pytest.fixture
def unavailable() -> UnavailablePartitions:
    def open_client() -> Client:
        return redis.Redis(unix_socket_path="/nonexistent/redis.sock")

    return UnavailablePartitions(open_client, RedisHealth(get_log(), "redis://nowhere"), lambda: None)


class TestGivenAPartitionThatIsBack:
    def test_when_two_threads_hear_its_answer_at_once_then_neither_fails(
        self, unavailable: UnavailablePartitions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unavailable.failed(KEYS, RedisConnectionError("cut"))
        unavailable.stop()  # none is away from now on
        monkeypatch.setattr(unavailable, "_lock", Interloper(unavailable))

        unavailable.answered(KEYS)

        assert KEYS not in unavailable

    def test_when_it_is_away_again_then_an_earlier_answer_does_not_say_that_it_is_back(
        self, unavailable: UnavailablePartitions
    ) -> None:
        unavailable.failed(KEYS, RedisConnectionError("cut"))

        unavailable.answered(KEYS)

        assert KEYS in unavailable
        unavailable.stop()
