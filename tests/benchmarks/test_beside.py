"""`benchmarks beside`: the parts of a running service are found, and each has its time."""

import pytest

from benchmarks.service.beside import PARTS, measure


@pytest.mark.long
class TestGivenAServiceOfTheNullModel:
    def test_when_a_run_is_measured_then_every_part_has_used_the_processor(self) -> None:
        [parts] = measure(16, 1, None, stream=True, read=False)

        assert tuple(parts) == PARTS
        assert {name: ms for name, ms in parts.items() if not 0 < ms < 10_000} == {}
