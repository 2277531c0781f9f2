"""The number of workers that a backlog needs, over any state of a queue and any bounds."""

from dataclasses import replace
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol.scaling.backlog import Backlog
from sluice.protocol.scaling.demand import ScalePolicy, wanted_workers

COUNTS = st.integers(0, 10**6)
TOKENS = st.integers(0, 10**12)
RATES = st.none() | st.floats(1e-300, 1e12, allow_nan=False)


@st.composite
def backlogs(draw: st.DrawFn) -> Backlog:
    return Backlog(
        queue="q",
        backlog_jobs=draw(COUNTS),
        backlog_tokens=draw(TOKENS),
        running_jobs=draw(COUNTS),
        running_tokens=draw(TOKENS),
        workers=draw(COUNTS),
        worker_tokens_per_s=draw(RATES),
        rate_source="measured",
        oldest_age_s=None,
        nearest_deadline_s=None,
        is_paused=draw(st.booleans()),
    )


@st.composite
def policies(draw: st.DrawFn) -> ScalePolicy:
    low, high = sorted((draw(st.integers(0, 1000)), draw(st.integers(0, 1000))))
    return ScalePolicy(within_s=draw(st.floats(0.001, 1e6)), min_workers=low, max_workers=high)


class TestGivenAnyBacklogAndBounds:
    @given(backlogs(), policies())
    def test_when_workers_are_counted_then_the_bounds_hold(self, backlog: Backlog, policy: ScalePolicy) -> None:
        assert policy.min_workers <= wanted_workers(backlog, policy) <= policy.max_workers

    @given(backlogs(), policies(), COUNTS, TOKENS)
    def test_when_more_waits_then_no_fewer_workers_are_wanted(
        self, backlog: Backlog, policy: ScalePolicy, jobs: int, tokens: int
    ) -> None:
        more = replace(
            backlog, backlog_jobs=backlog.backlog_jobs + jobs, backlog_tokens=backlog.backlog_tokens + tokens
        )

        assert wanted_workers(more, policy) >= wanted_workers(backlog, policy)

    @given(backlogs(), policies(), st.floats(1.0, 100.0))
    def test_when_there_is_less_time_then_no_fewer_workers_are_wanted(
        self, backlog: Backlog, policy: ScalePolicy, factor: float
    ) -> None:
        sooner = replace(policy, within_s=policy.within_s / factor)

        assert wanted_workers(backlog, sooner) >= wanted_workers(backlog, policy)

    @given(backlogs(), policies())
    def test_when_there_is_work_then_at_least_one_is_wanted(self, backlog: Backlog, policy: ScalePolicy) -> None:
        has_work = backlog.running_jobs > 0 or (backlog.backlog_jobs > 0 and not backlog.is_paused)

        wanted = wanted_workers(backlog, policy)

        assert wanted >= min(1, policy.max_workers) if has_work else wanted == policy.min_workers

    @given(backlogs(), policies())
    def test_when_jobs_are_few_then_no_more_workers_than_jobs(self, backlog: Backlog, policy: ScalePolicy) -> None:
        wanted = wanted_workers(backlog, policy)

        assert wanted <= max(policy.min_workers, backlog.running_jobs + backlog.backlog_jobs)

    @given(st.integers(1, 10**9), st.floats(1.0, 1e6), st.floats(1.0, 1e4))
    def test_when_nothing_else_bounds_it_then_the_number_clears_it_in_time(
        self, tokens: int, rate: float, within_s: float
    ) -> None:
        backlog = Backlog(
            queue="q", backlog_jobs=10**9, backlog_tokens=tokens, running_jobs=0, running_tokens=0, workers=0,
            worker_tokens_per_s=rate, rate_source="remembered", oldest_age_s=None, nearest_deadline_s=None,
            is_paused=False,
        )  # fmt: skip
        policy = ScalePolicy(within_s=within_s, max_workers=100_000)

        assert wanted_workers(backlog, policy) == min(ceil(tokens / (rate * within_s)), 100_000)
