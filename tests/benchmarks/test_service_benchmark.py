"""The service's benchmark over the null model: jobs run to their ends, and an idle worker is woken."""

import pytest

from benchmarks.engine.bare import Job
from benchmarks.processes import server, worker
from benchmarks.service.load import batching, run_through
from benchmarks.service.run import wakes_ms
from sluice.producer.client import Producer

pytestmark = pytest.mark.slow


class TestGivenAServiceOfTheNullModel:
    def test_when_jobs_are_run_then_the_time_is_that_between_their_first_start_and_last_end(self) -> None:
        jobs = [Job((1, 2, 3), 20), Job((4, 5), 10)]

        with server() as here, Producer() as producer, worker(here, *batching(2), model="null?step_s=0.01"):
            took_s = run_through(here, producer, jobs)

        assert 0.18 < took_s < 20  # 19 steps; times are whole milliseconds

    @pytest.mark.long
    def test_when_an_idle_worker_is_woken_then_each_job_has_its_time(self) -> None:
        found = wakes_ms(2)

        assert len(found) == 2
        assert all(0 < ms < 20_000 for ms in found)
