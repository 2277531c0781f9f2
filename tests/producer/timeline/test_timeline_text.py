"""The timeline of a job on a terminal."""

from hypothesis import given
from hypothesis import strategies as st

from sluice.producer.timeline.picture import Attempt, picture
from sluice.producer.timeline.text import LEGEND, lines_of
from tests.producer.timeline.test_picture import attempt, times


class TestGivenAJobWhoseWorkerDied:
    def test_when_it_is_drawn_then_each_attempt_is_a_line_with_its_end(self) -> None:
        job = times(
            attempts=(
                Attempt(number=1, start_ms=100, end_ms=400, outcome="returned", why="death"),
                attempt(2, 600, 1000, "done"),
            ),
            scheduled_ms=100,
            first_token_ms=200,
        )

        lines = list(lines_of(picture(job, now_ms=0), job, width=71))

        assert lines == [
            "queue     ····            ·········",
            "attempt 1     ▒▒▒▒████████✗                          worker died 300 ms",
            "attempt 2                          ████████████████● done 400 ms",
            "          0 ms    200 ms  400 ms   600 ms  800 ms",
            f"          {LEGEND}",
        ]


class TestGivenAPreemptedJobWhoseWorkerWasLost:
    def test_when_it_is_drawn_then_both_are_seen(self) -> None:
        first = Attempt(
            number=1, start_ms=0, end_ms=600, outcome="returned", why="death", seen_ms=400, preemptions=((100, 200),)
        )
        job = times(attempts=(first, attempt(2, 600, 1000, "done")), first_token_ms=0)

        lines = list(lines_of(picture(job, now_ms=0), job, width=76))

        assert lines[1] == "attempt 1 ████▁▁▁▁▁█████████~~~~~~~~~~✗                   worker died 600 ms"


class TestGivenAnyJob:
    @given(
        moments=st.lists(st.integers(0, 10**7), min_size=6, max_size=6).map(sorted),
        is_over=st.booleans(),
        width=st.integers(60, 200),
    )
    def test_when_it_is_drawn_then_no_line_is_wider_than_the_terminal(
        self, moments: list[int], is_over: bool, width: int
    ) -> None:
        attempts = (
            attempt(1, moments[0], moments[3], "returned"),
            attempt(2, moments[4], moments[5] if is_over else None, "done" if is_over else None),
        )
        job = times(
            "done" if is_over else "running",
            moments[5] if is_over else None,
            attempts,
            scheduled_ms=moments[1],
            first_token_ms=moments[2],
        )

        lines = list(lines_of(picture(job, now_ms=moments[5]), job, width=width))

        assert len(lines) == 5
        assert all(len(line) <= max(width, len(LEGEND) + 10) for line in lines)
