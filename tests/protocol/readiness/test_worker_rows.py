"""The rows of a queue's workers: whatever a heartbeat has, it can be shown."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol.calls import QueueView
from sluice.protocol.workers import MAX_NUMBER, MAX_PID, WorkerRow, workers_of

NUMBERS = (
    *("pid", "places", "running", "waiting", "kv_tokens_used", "kv_tokens_total", "tokens_per_s"),
    "started_ms",
)
TEXTS = ("host", "name", "model", "version", "device", "state", "recent")
FOREIGN = ("inf", "-inf", "nan", "1e400", "-1", "9" * 400, "", "x")
values = st.sampled_from(FOREIGN) | st.floats().map(str) | st.integers().map(str) | st.text()


def rows_of(*workers: Mapping[str, str]) -> list[WorkerRow]:
    view = QueueView(
        waiting_jobs=0, waiting_tokens=0, waiting_bytes=0, running_jobs=0, worker_deaths=0, oldest_ms=None,
        is_paused=False, totals={}, dead=0, suspects=0, outbox_entries=0, callback_entries=0,
        workers={str(number): about for number, about in enumerate(workers)}, lanes=(), settings={}, server_ms=0,
    )  # fmt: skip
    return list(workers_of("q", [view]))


class TestGivenAForeignHeartbeat:
    @given(st.dictionaries(st.sampled_from(NUMBERS + TEXTS), values))
    def test_when_workers_are_read_then_each_has_a_row_with_sound_numbers(self, about: dict[str, str]) -> None:
        [foreign, _] = rows_of(about, {"host": "\U0010ffff", "pid": "7"})

        assert foreign.pid is None or 0 < foreign.pid <= MAX_PID
        numbers = (
            *(foreign.places, foreign.running, foreign.waiting, foreign.kv_share),
            *(foreign.tokens_per_s, foreign.started_ms or 0),
        )
        assert all(0 <= number <= MAX_NUMBER for number in numbers)

    @pytest.mark.parametrize("pid", FOREIGN)
    def test_when_its_pid_is_none_then_no_process_is_named(self, pid: str) -> None:
        assert [row.pid for row in rows_of({"pid": pid})] == [None]

    def test_when_a_sample_is_too_large_then_it_has_none(self) -> None:
        assert rows_of({"recent": f"1,2,{'9' * 400},4,5"})[0].samples == ()
