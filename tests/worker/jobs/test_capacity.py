"""What a worker gets through while it is full, over jobs whose output the test makes."""

from itertools import pairwise

import pytest

from sluice.engine.request import SequenceStats, TokenDelta
from sluice.protocol.calls import LeasedJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobSpec
from sluice.worker.jobs.capacity import WEIGHT, WINDOW_S, Capacity
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.leases import Leases


def job_of(cost: int, *, output: int = 0) -> HeldJob:
    """A job with a prompt of 10 tokens that has generated `output` tokens."""
    leased = LeasedJob(
        id=JobId("0.t.a"), epoch=1, attempt=1, priority=0, spec=b"", payload=b"", seed=1, choices=1, submitted_ms=0,
        pulled_ms=0, deadline_ms=None, prompt_tokens=10, published=(0,), ended=(False,), fingerprint=None,
        fits=True, cost=cost,
    )  # fmt: skip
    job = Leases().new_job(leased, QueueKeys("q"), JobSpec())
    if output:
        job.admit()
        delta = TokenDelta(
            request_id=job.request_id,
            choice=0,
            start=0,
            token_ids=tuple(range(output)),
            text="",
            stats=SequenceStats(num_prompt_tokens=10),
        )
        job.add_output(delta, now_s=0.0, now_ms=0)
    return job


def window(capacity: Capacity, number: int, *jobs: HeldJob, has_backlog: bool = True) -> float | None:
    """Sample at the end of a window, as the heartbeat would."""
    capacity.note_backlog(has_backlog=has_backlog)
    capacity.sample(number * WINDOW_S, jobs)
    return capacity.tokens_per_s


class TestGivenAFullWorker:
    def test_when_a_done_job_used_less_than_it_reserved_then_all_counts(self) -> None:
        capacity = Capacity()
        window(capacity, 0)

        capacity.end(job_of(100, output=20), JobState.DONE)

        assert window(capacity, 1) == 100 / WINDOW_S

    def test_when_a_job_is_cancelled_then_only_what_it_used_counts(self) -> None:
        capacity = Capacity()
        window(capacity, 0)

        capacity.end(job_of(100, output=20), JobState.CANCELLED)

        assert window(capacity, 1) == 30 / WINDOW_S

    def test_when_a_job_runs_then_it_counts_as_it_goes_and_its_cost_in_all(self) -> None:
        capacity = Capacity()
        window(capacity, 0)

        first = window(capacity, 1, job_of(100, output=40))
        capacity.end(job_of(100, output=60), JobState.DONE)
        second = window(capacity, 2)

        assert first == 50 / WINDOW_S
        assert second == pytest.approx(50 / WINDOW_S)

    def test_when_output_exceeds_the_reserve_then_the_cost_is_not_exceeded(self) -> None:
        assert job_of(100, output=500).used_tokens == 100

    def test_when_it_gets_slower_then_the_rate_follows(self) -> None:
        capacity = Capacity()
        window(capacity, 0)
        for number in range(1, 4):
            capacity.end(job_of(100), JobState.DONE)
            window(capacity, number)

        rates: list[float | None] = []
        for number in range(4, 12):
            capacity.end(job_of(50), JobState.DONE)
            rates.append(window(capacity, number))

        assert all(after < before for before, after in pairwise(filter(None, rates)))
        assert rates[-1] == pytest.approx(50 / WINDOW_S, rel=0.1)

    def test_when_a_held_job_is_lost_then_the_rate_is_not_negative(self) -> None:
        capacity = Capacity()
        window(capacity, 0, job_of(100, output=90))

        assert window(capacity, 1) is None


class TestGivenAWorkerWithRoom:
    """No job waits: its rate says only what it gets through at least."""

    def test_when_it_does_less_then_the_rate_stays(self) -> None:
        capacity = Capacity()
        window(capacity, 0, has_backlog=False)
        capacity.end(job_of(100), JobState.DONE)
        before = window(capacity, 1, has_backlog=False)

        assert before == 100 / WINDOW_S
        assert window(capacity, 2, has_backlog=False) == before

    def test_when_it_does_more_then_the_rate_rises(self) -> None:
        capacity = Capacity()
        window(capacity, 0, has_backlog=False)
        rates: list[float | None] = []
        for number, cost in enumerate((50, 100), start=1):
            capacity.end(job_of(cost), JobState.DONE)
            rates.append(window(capacity, number, has_backlog=False))

        assert rates == [50 / WINDOW_S, (50 + WEIGHT * 50) / WINDOW_S]

    def test_when_a_backlog_lasts_for_part_of_a_window_then_it_is_no_full_one(self) -> None:
        capacity = Capacity()
        window(capacity, 0)
        capacity.end(job_of(100), JobState.DONE)
        window(capacity, 1)
        capacity.note_backlog(has_backlog=False)
        capacity.sample(1.5 * WINDOW_S, [])

        assert window(capacity, 2) == 100 / WINDOW_S


class TestGivenNews:
    def test_when_they_are_taken_then_there_are_none_until_the_next_window(self) -> None:
        capacity = Capacity()
        window(capacity, 0)
        capacity.end(job_of(100), JobState.DONE)
        window(capacity, 1)

        assert [capacity.take_news(), capacity.take_news()] == [100 / WINDOW_S, None]

    def test_when_nothing_was_ever_done_then_there_are_none(self) -> None:
        capacity = Capacity()
        window(capacity, 0)
        window(capacity, 1)

        assert capacity.take_news() is None
