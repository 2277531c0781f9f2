"""What the engine's plain Python may cost, as a ratio: milliseconds are for `python -m benchmarks engine`."""

import pytest

from benchmarks.engine.scheduler import measure

MAX_RATIO = 6.0
"""To what the null model itself takes in the same run, whatever the machine's speed. 3.4 to 3.7 was measured."""


class TestGivenSequencesThatAllGenerate:
    @pytest.mark.slow
    @pytest.mark.parametrize("num_running", [64, 256])
    def test_when_steps_are_measured_then_the_best_costs_a_few_null_model_steps(self, num_running: int) -> None:
        cost = measure(num_running, num_windows=30)

        assert cost.best_ms < MAX_RATIO * cost.executor_ms
