"""The timeline of a job as bars and marks."""

from dataclasses import replace

import pytest

from sluice.producer.timeline.picture import Attempt, Times, picture


def times(
    state: str = "done", ended_ms: int | None = 1000, attempts: tuple[Attempt, ...] = (), **known: int | None
) -> Times:
    """A job that was submitted at 0."""
    moments: dict[str, int | None] = {"scheduled_ms": None, "first_token_ms": None, **known}
    return Times(
        state=state,
        submitted_ms=0,
        scheduled_ms=moments["scheduled_ms"],
        first_token_ms=moments["first_token_ms"],
        ended_ms=ended_ms,
        attempts=attempts,
        preemptions=0,
    )


def attempt(number: int, start_ms: int, end_ms: int | None, outcome: str | None = None) -> Attempt:
    """An attempt."""
    return Attempt(number=number, start_ms=start_ms, end_ms=end_ms, outcome=outcome, why=None)


class TestGivenAJob:
    def test_when_it_waits_then_one_bar_reaches_until_now(self) -> None:
        drawn = picture(times("queued", None), now_ms=500)

        assert [(bar.kind, bar.start, bar.width) for bar in drawn.bars] == [("queue", 0, 100)]
        assert drawn.marks == ()

    def test_when_it_is_done_then_the_bars_are_in_proportion_to_time(self) -> None:
        done = times(attempts=(attempt(1, 100, 1000, "done"),), scheduled_ms=100, first_token_ms=300)

        drawn = picture(done, now_ms=9999)

        assert [(bar.lane, bar.kind, bar.start, bar.width) for bar in drawn.bars] == [
            (0, "queue", 0, 10),
            (1, "prefill", 10, 20),
            (1, "decode", 30, 70),
        ]
        assert [(mark.kind, mark.at, mark.lane) for mark in drawn.marks] == [("end-done", 100, 1)]

    def test_when_its_worker_died_then_the_hand_over_is_marked_and_the_next_goes_on(self) -> None:
        attempts = (attempt(1, 0, 400, "returned"), attempt(2, 600, 1000, "done"))

        drawn = picture(times(attempts=attempts, first_token_ms=100), now_ms=9999)

        assert [(mark.kind, mark.at, mark.lane) for mark in drawn.marks] == [("death", 40, 1), ("end-done", 100, 2)]
        assert [(bar.kind, bar.start, bar.width) for bar in drawn.bars if bar.lane == 2] == [("decode", 60, 40)]
        assert [(bar.kind, bar.start, bar.width) for bar in drawn.bars if bar.lane == 0] == [("queue", 40, 20)]

    def test_when_its_worker_was_silent_before_then_that_time_is_not_drawn_as_generating(self) -> None:
        lost = replace(attempt(1, 0, 600, "returned"), seen_ms=300)

        drawn = picture(times(attempts=(lost, attempt(2, 600, 1000, "done")), first_token_ms=100), now_ms=9999)

        assert [(bar.kind, bar.start, bar.width) for bar in drawn.bars if bar.lane == 1] == [
            ("prefill", 0, 10),
            ("decode", 10, 20),
            ("lost", 30, 30),
        ]

    def test_when_its_first_worker_died_before_it_was_scheduled_then_that_attempt_only_waited(self) -> None:
        attempts = (attempt(1, 0, 400, "returned"), attempt(2, 400, 1000, "done"))

        drawn = picture(times(attempts=attempts, scheduled_ms=500, first_token_ms=600), now_ms=9999)

        assert [(bar.lane, bar.kind, bar.start, bar.width) for bar in drawn.bars] == [
            (1, "queue", 0, 40),
            (2, "queue", 40, 10),
            (2, "prefill", 50, 10),
            (2, "decode", 60, 40),
        ]

    def test_when_it_was_preempted_then_each_wait_lies_over_what_it_interrupted(self) -> None:
        preempted = replace(attempt(1, 0, 1000, "done"), preemptions=((400, 500), (800, None)))

        drawn = picture(times(attempts=(preempted,), first_token_ms=100), now_ms=9999)

        assert [(bar.kind, bar.start, bar.width, bar.title) for bar in drawn.bars][-2:] == [
            ("preempted", 40, 10, "Preempted: 100 ms"),
            ("preempted", 80, 20, "Preempted: 200 ms"),
        ]

    @pytest.mark.parametrize(("count", "note"), [(0, ""), (1, ", preempted once"), (3, ", preempted 3 times")])
    def test_when_it_was_preempted_then_its_lane_says_how_often(self, count: int, note: str) -> None:
        done = replace(times(attempts=(attempt(1, 0, 1000, "done"),)), preemptions=count)

        assert picture(done, now_ms=9999).lanes == ("Queue", f"Attempt 1{note}")

    def test_when_the_end_of_an_attempt_is_not_recorded_yet_then_it_ends_with_the_next(self) -> None:
        attempts = (attempt(1, 0, None), attempt(2, 600, None))

        drawn = picture(times("running", None, attempts, first_token_ms=100), now_ms=1000)

        assert [(bar.lane, bar.start, bar.width) for bar in drawn.bars if bar.kind == "decode"] == [
            (1, 10, 50),
            (2, 60, 40),
        ]
        assert [(mark.kind, mark.at) for mark in drawn.marks] == [("death", 60)]

    def test_when_its_scale_is_read_then_ticks_are_few_and_round(self) -> None:
        drawn = picture(times(ended_ms=89_000), now_ms=0)

        assert [tick.text for tick in drawn.ticks] == ["0 ms", "20 s", "40 s", "1 m 0 s", "1 m 20 s"]

    def test_when_it_took_no_time_then_it_can_be_drawn(self) -> None:
        assert picture(times(ended_ms=0), now_ms=0).ticks[0].at == 0
