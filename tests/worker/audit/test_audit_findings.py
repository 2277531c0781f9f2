"""What an audit takes for a disagreement, and what for a job that is only on its way. No servers."""

from typing import Any

import pytest

from sluice.protocol.calls.audit import JobRecords
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from sluice.worker.audit.findings import (
    Finding,
    HistoryRow,
    Kind,
    is_confirmed,
    with_history,
    with_journal,
    within_queue,
)

ID = JobId("0.t.one")


def records(state: JobState | None = JobState.QUEUED, **changes: Any) -> JobRecords:  # Any: the fields of JobRecords
    """A sound job."""
    is_queued, is_running = state is JobState.QUEUED, state is JobState.RUNNING
    known: dict[str, Any] = {
        "id": ID, "problem": None if state else "unknown", "state": state, "version": 1, "cost": 3, "bytes": 4,
        "epoch": 1, "entry": "1-1" if is_queued else None, "lane": "0:t" if is_queued else None,
        "has_entry": is_queued, "is_delayed": False, "is_suspect": False, "has_timer": False,
        "owner": "w" if is_running else None, "lease_epoch": 1, "is_held": is_running, "is_owner_listed": is_running,
        "has_payload": True, "dead_ms": None, "ended_ms": None, "submitted_ms": 1, "seen_ms": 10, "is_in_batch": None,
        "has_open_channel": False, "strays": (),
    }  # fmt: skip
    return JobRecords(**(known | changes))


def seen(queue: JobRecords, history: HistoryRow | None) -> Finding:
    """What one look finds."""
    finding = with_history(queue, history) or with_journal(queue, history, has_retention=False)
    assert finding is not None
    return finding


class TestGivenTwoLooksAtAJobThatGoesOn:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            pytest.param((2, None), (3, 2), id="its first event came meanwhile"),
            pytest.param((3, 2), (5, 3), id="the history reached what was seen, and is behind again"),
            pytest.param((3, 4), (5, 6), id="the queue was seen before the history, both times"),
        ],
    )
    def test_when_both_differ_but_what_was_seen_has_arrived_then_it_is_no_disagreement(
        self, first: tuple[int, int | None], second: tuple[int, int | None]
    ) -> None:
        sides = [(records(version=queue), row(history)) for queue, history in (first, second)]
        one, other = (seen(*side) for side in sides)

        assert not is_confirmed(one, other, *sides[1])

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            pytest.param((2, None), (3, None), id="no row came"),
            pytest.param((3, 2), (5, 2), id="the row stood still"),
            pytest.param((3, 5), (4, 5), id="the queue is behind still"),
        ],
    )
    def test_when_it_has_not_arrived_then_it_is_one(
        self, first: tuple[int, int | None], second: tuple[int, int | None]
    ) -> None:
        sides = [(records(version=queue), row(history)) for queue, history in (first, second)]
        one, other = (seen(*side) for side in sides)

        assert is_confirmed(one, other, *sides[1])

    @pytest.mark.parametrize(("later", "is_one"), [(2, True), (3, False)])
    def test_when_a_counter_is_off_then_it_is_one_only_if_it_is_off_as_much(self, later: int, is_one: bool) -> None:
        first, second = (Finding(kind=Kind.COUNTER, subject="0: waiting_jobs", drift=drift) for drift in (2, later))

        assert is_confirmed(first, second, None, None) is is_one


def row(version: int | None) -> HistoryRow | None:
    """A row, or none."""
    return None if version is None else HistoryRow(state=JobState.RUNNING, version=version)


class TestGivenOneLook:
    @pytest.mark.parametrize("state", [JobState.QUEUED, JobState.RUNNING, JobState.DONE, None])
    def test_when_all_is_sound_then_nothing_is_found(self, state: JobState | None) -> None:
        assert list(within_queue(records(state, is_held=state is JobState.RUNNING))) == []

    def test_when_a_dead_member_is_past_its_time_then_it_only_waits_to_be_swept(self) -> None:
        fourteen_days_ms = 14 * 86_400_000

        (found,) = within_queue(records(None, dead_ms=10.0, seen_ms=fourteen_days_ms))
        assert found.kind is Kind.NO_SUCH_JOB
        assert list(within_queue(records(None, dead_ms=10.0, seen_ms=fourteen_days_ms + 11))) == []

    def test_when_an_ended_job_is_gone_from_the_queue_then_it_was_forgotten_in_time(self) -> None:
        assert with_history(records(None), HistoryRow(state=JobState.DONE, version=3)) is None
        assert seen(records(None), HistoryRow(state=JobState.RUNNING, version=3)).kind is Kind.FORGOTTEN
        assert seen(records(None), None).kind is Kind.UNKNOWN_TO_ALL
