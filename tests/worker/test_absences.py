"""Who is away, when two threads tell of it at once."""

from types import TracebackType

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from producer.contract.keys import QueueKeys
from worker.absences import Absences
from worker.connections import Client
from worker.health import RedisHealth
from worker.log import get_log

KEYS = QueueKeys("q")


class Interloper:
    """In a lock's place: before it is had, another thread has done its part."""

    def __init__(self, absences: Absences) -> None:
        self._absences = absences

    def __enter__(self) -> None:
        self._absences._known.pop(KEYS, None)  # pyright: ignore[reportPrivateUsage]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


@pytest.fixture
def absences() -> Absences:
    def open_client() -> Client:
        raise RedisConnectionError("nobody is there")

    return Absences(open_client, RedisHealth(get_log(), "redis://nowhere"), lambda: None)


class TestGivenAPartitionThatIsBack:
    def test_when_two_threads_hear_its_answer_at_once_then_neither_fails(
        self, absences: Absences, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        absences.failed(KEYS, RedisConnectionError("cut"))
        absences.stop()  # nobody is away from now on
        monkeypatch.setattr(absences, "_lock", Interloper(absences))

        absences.answered(KEYS)

        assert KEYS not in absences

    def test_when_it_is_away_again_then_an_earlier_answer_does_not_say_that_it_is_back(
        self, absences: Absences
    ) -> None:
        absences.failed(KEYS, RedisConnectionError("cut"))

        absences.answered(KEYS)

        assert KEYS in absences
        absences.stop()
