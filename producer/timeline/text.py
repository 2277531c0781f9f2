"""Draw the timeline of a job with characters. No I/O."""

from collections.abc import Iterator

from sluice.producer.timeline.durations import seconds
from sluice.producer.timeline.picture import Bar, TimelinePicture, Times

MARKS = {
    "queue": "·",
    "prefill": "▒",
    "decode": "█",
    "preempted": "▁",
    "lost": "~",
    "death": "✗",
    "end-done": "●",
    "end-bad": "✗",
}
LEGEND = "· waits   ▒ prompt   █ output   ▁ preempted   ~ worker lost   ✗ handed over or failed   ● done"
LEAST_COLUMNS = 20


def lines_of(drawn: TimelinePicture, times: Times, *, width: int) -> Iterator[str]:
    """Yield the lines of a timeline, at most `width` long unless that is too narrow to draw.

    Each lane is a line: the queue, then the attempts and how they ended.
    """
    names = [name.split(",")[0].lower() for name in drawn.lanes]
    margin = max(map(len, names)) + 1
    ends = ["", *(_end_of(times, number) for number in range(len(times.attempts)))]
    columns = max(LEAST_COLUMNS, width - margin - max(map(len, ends)) - 1)
    for lane, (name, end) in enumerate(zip(names, ends, strict=True)):
        yield f"{name:<{margin}}{_lane(drawn, lane, columns)} {end}".rstrip()
    yield " " * margin + _scale(drawn, columns).rstrip()
    yield " " * margin + LEGEND


def _lane(drawn: TimelinePicture, lane: int, columns: int) -> str:
    line = [" "] * columns
    for bar in drawn.bars:
        if bar.lane == lane:
            _fill(line, bar)
    for mark in drawn.marks:
        if mark.lane == lane:
            line[min(columns - 1, int(mark.at * columns / 100))] = MARKS[mark.kind]
    return "".join(line)


def _fill(line: list[str], bar: Bar) -> None:
    """Draw a bar of at least one column."""
    columns = len(line)
    start = min(columns - 1, int(bar.start * columns / 100))
    end = max(start + 1, int((bar.start + bar.width) * columns / 100))
    line[start:end] = MARKS[bar.kind] * (min(end, columns) - start)


def _scale(drawn: TimelinePicture, columns: int) -> str:
    line = [" "] * columns
    free = 0
    for tick in drawn.ticks:
        start = int(tick.at * columns / 100)
        if free <= start and start + len(tick.text) <= columns:
            line[start : start + len(tick.text)] = tick.text
            free = start + len(tick.text) + 1
    return "".join(line)


def _end_of(times: Times, number: int) -> str:
    attempt = times.attempts[number]
    end_ms = attempt.end_ms or times.ended_ms
    took = "" if end_ms is None else f" {seconds((end_ms - attempt.start_ms) / 1000)}"
    return f"{attempt.reason or attempt.outcome or times.state}{took}"
