"""What a group's queues ask of the device, from what was read of them."""

from typing import Any

import pytest

from sluice.protocol.scaling.backlog import Backlog
from sluice.worker.processes.turns.observed import Seen, demand_of


def seen(*, oldest_s: dict[float, float] | None = None, is_unserved: bool = True, **facts: Any) -> Seen:
    """A queue with these facts, otherwise empty."""
    empty: dict[str, Any] = {
        "queue": "q", "backlog_jobs": 0, "backlog_tokens": 0, "running_jobs": 0, "running_tokens": 0, "workers": 0,
        "worker_tokens_per_s": None, "rate_source": "unknown", "oldest_age_s": None, "nearest_deadline_s": None,
        "is_paused": False,
    }  # fmt: skip
    return Seen(at_s=0.0, backlog=Backlog(**empty | facts), oldest_s=oldest_s or {}, is_unserved=is_unserved, offers={})


class TestGivenAQueueWithWaitingJobs:
    def test_when_its_model_is_away_then_waits_count_by_their_class(self) -> None:
        demand = demand_of("a", seen(backlog_jobs=2, oldest_s={1.0: 30.0, 2.0: 20.0}), away_s=100.0, can_run=True)

        assert (demand.waits_s, demand.weighted_wait_s, demand.weight) == (30.0, 40.0, 2.0)

    def test_when_its_model_left_a_moment_ago_then_no_job_has_waited_for_longer(self) -> None:
        demand = demand_of("a", seen(backlog_jobs=1, oldest_s={1.0: 3600.0}), away_s=5.0, can_run=True)

        assert (demand.waits_s, demand.weighted_wait_s) == (5.0, 5.0)

    def test_when_it_is_paused_then_it_asks_for_nothing(self) -> None:
        facts = seen(backlog_jobs=1, oldest_s={1.0: 9.0}, is_paused=True, nearest_deadline_s=3.0)

        demand = demand_of("a", facts, away_s=9.0, can_run=True)

        assert (demand.has_work, demand.waits_s, demand.deadline_s) == (False, 0.0, None)

    def test_when_none_is_at_the_head_of_a_lane_then_they_have_waited_since_the_model_left(self) -> None:
        assert demand_of("a", seen(backlog_jobs=1), away_s=7.0, can_run=True).waits_s == 7.0, "a suspect"

    @pytest.mark.parametrize(("rate", "work_s"), [(None, None), (50.0, 6.0)])
    def test_when_the_rate_is_known_then_so_is_the_work(self, rate: float | None, work_s: float | None) -> None:
        facts = seen(backlog_jobs=1, backlog_tokens=200, running_tokens=100, worker_tokens_per_s=rate)

        assert demand_of("a", facts, away_s=1.0, can_run=True).work_s == work_s


class TestGivenJobsThatRun:
    @pytest.mark.parametrize(
        ("is_unserved", "away_s", "num_running", "waits_s"),
        [(False, None, 3, 0.0), (True, 8.0, 3, 8.0), (False, 8.0, 0, 0.0)],
        ids=["on the device", "of a worker that died", "on another host"],
    )
    def test_when_they_are_counted_then_only_those_that_need_the_device(
        self, is_unserved: bool, away_s: float | None, num_running: int, waits_s: float
    ) -> None:
        demand = demand_of("a", seen(running_jobs=3, is_unserved=is_unserved), away_s=away_s, can_run=True)

        assert (demand.running_jobs, demand.waits_s) == (num_running, waits_s)
