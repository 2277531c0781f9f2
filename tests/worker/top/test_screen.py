"""What `worker top` draws."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sluice.protocol.scaling.backlog import Backlog
from sluice.protocol.workers import Sample
from sluice.worker.top.screen import BARS, BATCH_SAMPLES, screen, sparkline
from sluice.worker.top.state import TopState
from tests.worker.top.test_state import row

BACKLOG = Backlog(
    queue="default", backlog_jobs=1203, backlog_tokens=45_000, running_jobs=12, running_tokens=900, workers=2,
    worker_tokens_per_s=None, rate_source="unknown", oldest_age_s=31.4, nearest_deadline_s=None, is_paused=True,
)  # fmt: skip
SAMPLE = Sample(running=4, waiting=0, kv_share=0.25, tokens_in=0, tokens_out=80)


def drawn(*, width: int = 140, state: TopState | None = None, rows: int = 2) -> str:
    """The screen as plain text."""
    workers = [
        row(f"worker-{number}", running=4, kv_share=0.25, tokens_per_s=1234.5, samples=(SAMPLE,) * 3)
        for number in range(rows)
    ]
    console = Console(width=width, record=True, file=None, quiet=True)
    shown = state or TopState()
    with console.capture() as captured:
        console.quiet = False
        console.print(screen([BACKLOG], shown.visible(workers), shown))
    return captured.get()


class TestGivenAQueueWithWorkers:
    def test_when_it_is_drawn_then_its_figures_and_workers_are_there(self) -> None:
        text = drawn()

        assert "queue default  paused   1,203 waiting (45,000 tokens, oldest 31 s)   12 running   2 workers" in text
        assert "2,469, at most 2,469 in 5 minutes" in text
        assert [line.split()[:3] for line in text.splitlines() if line.startswith("worker-")] == [
            ["worker-0", "gpu-1", "worker-0"],
            ["worker-1", "gpu-1", "worker-1"],
        ]
        assert [line.split()[6:9] for line in text.splitlines() if line.startswith("worker-")] == [
            ["4/64", "0", "25%"]
        ] * 2

    def test_when_a_sample_was_higher_than_now_then_it_is_the_highest(self) -> None:
        fast = row("a", tokens_per_s=10, samples=(replace(SAMPLE, tokens_out=4000), SAMPLE))
        console = Console(width=140)

        with console.capture() as captured:
            console.print(screen([BACKLOG], [fast], TopState()))

        assert "10, at most 4,000 in 5 minutes" in captured.get()

    def test_when_there_are_several_queues_then_each_has_a_line(self) -> None:
        console = Console(width=140)

        with console.capture() as captured:
            console.print(screen([replace(BACKLOG, queue="chat"), BACKLOG], [], TopState()))

        assert [line.split()[:2] for line in captured.get().splitlines()[:2]] == [
            ["queue", "chat"],
            ["queue", "default"],
        ]

    @pytest.mark.parametrize("width", [40, 80, 200])
    def test_when_the_terminal_is_narrow_then_no_line_is_longer(self, width: int) -> None:
        assert all(len(line) <= width for line in drawn(width=width).splitlines())

    def test_when_the_terminal_has_80_columns_then_no_figure_is_cut(self) -> None:
        samples = tuple(replace(SAMPLE, running=one) for one in range(30))
        busy = row("0123456789abcdef", host="gpu-node-17.example", model="Qwen3-0.6B-instruct", places=256,
                   running=256, waiting=9999, kv_share=1.0, tokens_per_s=12_345.0, samples=samples)  # fmt: skip
        console = Console(width=80)

        with console.capture() as captured:
            console.print(screen([BACKLOG], [busy], TopState()))

        [line] = [line for line in captured.get().splitlines() if line.startswith("01234567")]
        assert line.split()[-6:-1] == ["pulling", "256/256", "9,999", "100%", "12,345"]
        assert line.rstrip().endswith(sparkline([sample.running for sample in samples[-BATCH_SAMPLES:]], 29))

    def test_when_a_model_is_named_with_terminal_escapes_then_they_do_nothing(self) -> None:
        rows, console = (
            [row("a", model="\x1b]0;owned\x07tiny")],
            Console(width=140, force_terminal=True, color_system=None),
        )

        with console.capture() as captured:
            console.print(screen([BACKLOG], rows, TopState()))

        assert "\x1b]0;" not in captured.get()
        assert "tiny" in captured.get()

    def test_when_an_action_is_asked_then_the_last_line_asks_to_confirm(self) -> None:
        state = TopState()
        state.visible([row("worker-0")])
        state.press("d", [])

        assert drawn(state=state).rstrip().endswith("drain worker worker-0? y/n")


class TestGivenAQueueWithoutWorkers:
    @pytest.mark.parametrize(("pattern", "expected"), [("", "no living workers"), ("x", "no worker matches")])
    def test_when_it_is_drawn_then_it_says_so(self, pattern: str, expected: str) -> None:
        assert expected in drawn(rows=0, state=TopState(pattern=pattern))


class TestGivenAnyValues:
    @given(st.lists(st.integers(0, 10**9), max_size=30))
    def test_when_they_are_drawn_then_bars_are_in_the_order_of_values(self, values: list[int]) -> None:
        line = sparkline(values, max(values, default=0))

        heights = [BARS.index(one) for one in line]
        assert len(line) == len(values)
        assert all(a <= b for x, a in zip(values, heights, strict=True) for y, b in zip(values, heights, strict=True)
                   if x <= y)  # fmt: skip
        assert all((height == 0) == (value == 0) for value, height in zip(values, heights, strict=True))
