"""The loop's deadline, the server's clock, and who held what when a beat was sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.worker.clock import ServerClock
from sluice.worker.watchdog import SLOWER_BY, Watchdog


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class TestGivenALoop:
    def test_when_a_step_takes_longer_than_its_deadline_then_it_is_overdue_until_it_ends(self) -> None:
        clock = Clock()
        watchdog = Watchdog(30.0, clock)

        with watchdog:
            clock.now_s += 30.1
            assert watchdog.is_overdue
        assert not watchdog.is_overdue

    def test_when_a_step_raises_then_its_deadline_stands_for_the_shutdown(self) -> None:
        clock = Clock()
        watchdog = Watchdog(30.0, clock)

        with pytest.raises(RuntimeError), watchdog:
            raise RuntimeError

        clock.now_s += 30.1
        assert watchdog.is_overdue

    def test_when_steps_are_slow_then_the_next_one_has_five_times_as_long(self) -> None:
        clock = Clock()
        watchdog = Watchdog(30.0, clock)
        with watchdog:
            clock.now_s += 20.0

        with watchdog:
            clock.now_s += 20.0 * SLOWER_BY - 0.1
            assert not watchdog.is_overdue
            clock.now_s += 0.2
            assert watchdog.is_overdue

    def test_when_it_idles_then_it_is_never_overdue(self) -> None:
        clock = Clock()
        watchdog = Watchdog(30.0, clock)

        clock.now_s += 10_000
        assert not watchdog.is_overdue


class TestGivenAServerWithAClockOfItsOwn:
    @given(st.integers(0, 2**42), st.floats(0, 1e6), st.floats(0, 0.5))
    def test_when_read_then_it_is_known_to_half_a_round_trip(
        self, server_ms: int, sent_s: float, trip_s: float
    ) -> None:
        clock = ServerClock()

        clock.read(server_ms, sent_s=sent_s, received_s=sent_s + trip_s)

        assert abs(clock.ms(sent_s + trip_s / 2) - server_ms) <= 2

    def test_when_a_slower_trip_says_otherwise_then_the_faster_one_stands_for_a_minute(self) -> None:
        clock = ServerClock()
        clock.read(1_000_000, sent_s=10.0, received_s=10.001)

        clock.read(1_010_200, sent_s=20.0, received_s=20.4)
        assert abs(clock.ms(20.0) - 1_010_000) <= 1

        clock.read(1_070_500, sent_s=80.0, received_s=80.4)
        assert abs(clock.ms(80.2) - 1_070_500) <= 1
