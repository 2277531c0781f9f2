"""What the engine's plain Python may cost, with room for a machine that does other things too."""

import pytest

from benchmarks.scheduler import LIMITS_MS, measure


class TestGivenSequencesThatAllGenerate:
    @pytest.mark.slow
    @pytest.mark.parametrize(("num_running", "limit_ms"), LIMITS_MS.items())
    def test_when_steps_are_measured_then_the_best_of_them_is_within_the_limit(
        self, num_running: int, limit_ms: float
    ) -> None:
        assert measure(num_running, num_windows=30).best_ms < limit_ms
