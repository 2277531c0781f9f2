"""The benchmark gate: what passes, and one gauge for real."""

import pytest

from benchmarks.gate import limit, publish, recorded


class TestGivenRecordedRounds:
    def test_when_rounds_lie_close_then_a_tenth_more_passes_and_no_further(self) -> None:
        assert limit(recorded([2.0, 2.01, 1.99])) == pytest.approx(2.2)

    def test_when_rounds_spread_then_twice_the_spread_passes(self) -> None:
        assert limit(recorded([1.0, 1.2, 0.9])) == pytest.approx(1.4)


class TestGivenAServer:
    def test_when_a_gauge_is_measured_then_it_is_a_share_of_a_plain_job(self) -> None:
        assert 0.05 < publish() < 20
