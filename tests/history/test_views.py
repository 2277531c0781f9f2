"""What people read: percentiles against numpy, goodput against a loop, times and timelines."""

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import Engine

from sluice.history.tables import HOUR_MS, jobs
from sluice.history.views import METRICS, batch_progress, hourly_goodput, hourly_latency, job_times, timeline
from sluice.protocol.wire import encode_record
from tests.history import events as e
from tests.history.test_rows import write

HOUR = e.NOON_MS - e.NOON_MS % HOUR_MS


def ran(job_id: str, *, hour: int = 0, ttft_ms: int = 100, e2e_ms: int = 1050, tokens: int = 20) -> list[e.Packed]:
    """A whole job that was submitted at the beginning of an hour."""
    at_ms = HOUR + hour * HOUR_MS
    record = e.record(
        first_scheduled_ms=at_ms + ttft_ms // 2,
        first_token_ms=at_ms + ttft_ms,
        output_tokens=tokens,
        itl_p50_ms=ttft_ms / 3,
        itl_p99_ms=ttft_ms / 2,
    )
    return [e.submitted(job_id, at_ms), e.ended(job_id, at_ms + e2e_ms, record=encode_record(record))]


class TestGivenJobsOfSeveralHours:
    """Each with its own latencies."""

    @settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(
        made=st.lists(
            st.tuples(st.integers(0, 2), st.integers(2, 5_000), st.integers(0, 60_000), st.integers(1, 50)),
            min_size=1,
            max_size=40,
        )
    )
    def test_when_asked_for_percentiles_then_they_are_numpys(
        self, history: Engine, made: list[tuple[int, int, int, int]]
    ) -> None:
        with history.begin() as connection:
            connection.execute(jobs.delete())
        write(
            history,
            [
                event
                for number, (hour, ttft_ms, rest_ms, tokens) in enumerate(made)
                for event in ran(f"0.a.{number}", hour=hour, ttft_ms=ttft_ms, e2e_ms=ttft_ms + rest_ms, tokens=tokens)
            ],
        )

        with history.connect() as connection:
            found = connection.execute(sa.select(hourly_latency)).all()
            of_jobs = connection.execute(sa.select(jobs)).mappings().all()
        expected = {
            (job["finished_hour_ms"], metric) for job in of_jobs for metric in METRICS if job[metric] is not None
        }
        assert {(one.hour_ms, one.metric) for one in found} == expected
        for one in found:
            values = [job[one.metric] for job in of_jobs if job["finished_hour_ms"] == one.hour_ms]
            values = [value for value in values if value is not None]
            assert one.jobs == len(values)
            wanted = [float(np.mean(values)), *np.percentile(values, [50, 90, 95, 99]), max(values)]
            assert [one.mean_s, one.p50_s, one.p90_s, one.p95_s, one.p99_s, one.max_s] == pytest.approx(wanted)

    def test_when_some_failed_then_only_those_done_count(self, history: Engine) -> None:
        write(history, [*ran("0.a.1"), e.submitted("0.a.2"), e.ended("0.a.2", state=b"failed", reason=None)])

        with history.connect() as connection:
            found = connection.execute(sa.select(hourly_latency.c.jobs).distinct()).scalars().all()
        assert found == [1]


class TestGivenLimits:
    """`chat`: first token within 1 s, then 0.1 s a token. `background`: within the hour."""

    def test_when_asked_for_goodput_then_only_jobs_within_all_limits_are_good(self, history: Engine) -> None:
        quick = ran("0.a.1", ttft_ms=900, e2e_ms=2000, tokens=20)
        slow_start = ran("0.a.2", ttft_ms=1100, e2e_ms=2000, tokens=20)
        slow_tokens = ran("0.a.3", ttft_ms=500, e2e_ms=5000, tokens=10)
        one_token = ran("0.a.4", ttft_ms=500, e2e_ms=500, tokens=1)
        failed = [e.submitted("0.a.5", HOUR), e.ended("0.a.5", HOUR + 10, state=b"failed", reason=None, record=None)]
        write(history, [*quick, *slow_start, *slow_tokens, *one_token, *failed])

        with history.connect() as connection:
            found = {one.limits: one for one in connection.execute(sa.select(hourly_goodput))}
        assert (found["chat"].jobs, found["chat"].good_jobs, found["chat"].goodput) == (5, 2, 0.4)
        assert found["chat"].good_tokens_per_s == pytest.approx(21 / 3600)
        assert found["background"].good_jobs == 4
        assert isinstance(found["chat"].good_jobs_per_s, float)


class TestGivenAJobWithAPast:
    """Returned once, then done."""

    EVENTS = (
        e.submitted("0.a.1", batch=b"nightly"),
        e.started("0.a.1", e.NOON_MS + 40),
        e.returned("0.a.1", e.NOON_MS + 45),
        e.started("0.a.1", e.NOON_MS + 47, 4, epoch=2, attempt=2, incarnation=b"inc-2"),
        e.ended("0.a.1", version=5, epoch=2, attempt=2),
    )

    def test_when_asked_for_its_timeline_then_all_that_happened_is_there_in_order(self, history: Engine) -> None:
        write(history, list(self.EVENTS))

        with history.connect() as connection:
            found = connection.execute(sa.select(timeline).order_by("at_ms")).all()
        assert [(one.event, one.at_ms - e.NOON_MS, one.epoch, one.detail) for one in found] == [
            ("submitted", 0, None, "nightly"),
            ("pulled", 40, 1, "inc-1"),
            ("returned", 45, 1, "owner_died"),
            ("pulled", 47, 2, "inc-2"),
            ("scheduled", 50, None, None),
            ("first_token", 100, None, None),
            ("done", 1050, None, "stop"),
        ]
        assert found[0].at == "2027-01-15T08:00:00.000Z"

    def test_when_all_happened_in_one_millisecond_then_the_view_itself_has_the_order(self, history: Engine) -> None:
        at_ms = e.NOON_MS
        record = encode_record(e.record(first_scheduled_ms=at_ms, first_token_ms=at_ms))
        ended = e.ended("0.a.1", at_ms, version=5, epoch=2, attempt=2, record=record)
        twice = [
            e.started("0.a.1", at_ms),
            e.returned("0.a.1", at_ms),
            e.started("0.a.1", at_ms, 4, epoch=2, attempt=2),
        ]
        write(history, [e.submitted("0.a.1", at_ms), *twice, ended])

        with history.connect() as connection:
            found = connection.exec_driver_sql("SELECT event, epoch FROM timeline WHERE job_id = '0.a.1'").all()
        assert [tuple(one) for one in found] == [
            *(("submitted", None), ("pulled", 1), ("returned", 1), ("pulled", 2)),
            *(("scheduled", None), ("first_token", None), ("done", None)),
        ]

    def test_when_asked_for_its_times_then_they_are_utc_text_to_the_millisecond(self, history: Engine) -> None:
        write(history, list(self.EVENTS))

        with history.connect() as connection:
            found = connection.execute(sa.select(job_times)).one()
        assert (found.submitted_at, found.finished_at) == ("2027-01-15T08:00:00.000Z", "2027-01-15T08:00:01.050Z")

    def test_when_asked_for_its_batch_then_its_totals_are_exact(self, history: Engine) -> None:
        write(history, [*self.EVENTS, e.submitted("0.a.2", batch=b"nightly")])

        with history.connect() as connection:
            found = connection.execute(sa.select(batch_progress)).one()
        assert (found.id, found.jobs, found.queued, found.done, found.output_tokens) == ("nightly", 2, 1, 1, 20)
